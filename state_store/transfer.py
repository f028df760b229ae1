"""Move batches of rows between the store and its caller in the background; `take` never returns a stale row.

Batches in transit are field-major, so fields are contiguous. On a GPU, copies use their own stream and pinned memory,
and the caller's stream waits for an event; the caller does not wait. torch's caching allocator provides the pinned
memory: after the first steps it reuses the same buffers, each only after its copy is done.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from ..storage.arrays import Int64s
from ..storage.gpu_copies import Arriving, Copies, CudaDevice, wait_for
from ..storage.kernels import kernel
from ..storage.selection import Selection
from .background import BackgroundThread
from .errors import DuplicateIdError, FieldError, SampleIdError
from .records import IDS
from .rows import Rows
from .schema import VISITS, Schema


@dataclass
class StagedRows:
    """One batch of rows in host memory, pinned if the store's device is a GPU, and its copy on the device."""

    packed: torch.Tensor
    """int32 [fields + 1, b]: the bits of the fields' float32, then visits; together, so that one copy takes all."""
    on_device: Arriving | None = None
    """`packed` on a GPU."""

    @property
    def values(self) -> torch.Tensor:
        """float32 [fields, b]"""
        return self.packed[:-1].view(torch.float32)


class Staging:
    """Copies batches to and from one device, asynchronously if it is a GPU."""

    def __init__(self, schema: Schema, device: str | torch.device) -> None:
        self._schema = schema
        # Through a tensor, which resolves `cuda` to the current GPU, such as `cuda:0`, as in the caller's tensors.
        self.device = torch.empty(0, device=device).device
        self._copies = Copies(CudaDevice(self.device)) if self.device.type == "cuda" else None

    def rows(self, length: int) -> StagedRows:
        """Return empty host tensors for `length` rows."""
        shape = len(self._schema.names) + 1, length
        return StagedRows(torch.empty(shape, dtype=torch.int32, pin_memory=self._copies is not None))

    def upload(self, staged: StagedRows) -> None:
        """Start copying rows to the device. Call it again after a change. Thread-safe."""
        if self._copies is not None:
            staged.on_device = self._copies.upload([staged.packed])

    def as_state(self, staged: StagedRows) -> dict[str, torch.Tensor]:
        """Return every field, float32 [b], and visits, int32 [b], on the device, for the caller's current stream."""
        arrived = staged if staged.on_device is None else StagedRows(staged.on_device.here()[0])
        return {**dict(zip(self._schema.names, arrived.values.unbind(0), strict=True)), VISITS: arrived.packed[-1]}

    def download(self, state: Mapping[str, torch.Tensor], length: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start copying the fields of `state` into one host tensor [fields, length].

        Wait for the event, if any, before reading. Raises FieldError unless `state` has every field, float32 [length].
        """
        self._schema.check_names(state)
        for name in self._schema.names:
            if state[name].dtype != torch.float32 or state[name].shape != (length,):
                raise FieldError(
                    f"field {name!r} of the put is {state[name].dtype} of shape {tuple(state[name].shape)}; "
                    f"pass torch.float32 of shape ({length},), one value for each sample id"
                )
        fields = [state[name].detach() for name in self._schema.names]
        host = self.rows(length).values
        if self._copies is not None:
            return host, self._copies.download(fields, host)
        for row, field in zip(host.numpy(), fields, strict=True):
            row[:] = field.cpu().numpy()  # a tenth of the cost of a tensor's copy_, noticeable at 4,096 rows
        return host, None


T = TypeVar("T")
SampleIds: TypeAlias = Int64s | torch.Tensor
"""int64 [b]: a numpy array or a CPU tensor."""

_log = logging.getLogger(__name__)

_PREFETCHES_KEPT = 16
"""A prefetch is dropped after this many later prefetches or puts: its take may never come."""
_IDS_LOGGED = 20


@dataclass(frozen=True)
class _Prefetch:
    ids: Int64s
    ascending_ids: Int64s
    puts_seen: int  # number of the last put before the prefetch, which includes all puts up to it
    staged: Future[StagedRows | None]  # None if a row was not in memory


@dataclass(frozen=True)
class _Put:
    number: int
    ascending_ids: Int64s
    done: Future[None]
    made_at: float  # by the monotonic clock


class Transfer:
    """Prefetches, takes and puts of one caller. Ids are validated, int64 [b].

    `thread` gathers prefetched batches and writes new rows, in call order. Pending calls are recorded, so that `take`
    waits only for puts that share ids with its batch, and replaces only the rows that a prefetch has missed.
    """

    def __init__(self, rows: Rows, staging: Staging, selection: Selection | None) -> None:
        self.thread = BackgroundThread("rows")
        self.refused_rows = 0
        self._rows, self._staging, self._selection = rows, staging, selection
        self._puts_made = 0
        self._puts: deque[_Put] = deque()
        self._prefetches: deque[_Prefetch] = deque(maxlen=_PREFETCHES_KEPT)

    def prefetch(self, ids: Int64s) -> None:
        staged = self.thread.submit(self._gather, ids, wait=False)
        self._prefetches.append(_Prefetch(ids, np.sort(ids), self._puts_made, staged))

    def take(self, ids: Int64s) -> dict[str, torch.Tensor]:
        prefetch = self._claim(ids)
        staged = None if prefetch is None else self._result(prefetch.staged)
        if prefetch is None or staged is None:
            staged = self._gather_now(ids)
        else:
            self._forward(prefetch, staged)
        return self._staging.as_state(staged)

    def put(self, ids: Int64s, state: Mapping[str, torch.Tensor], step: int) -> None:
        ascending = sorted_without_repeats(ids)
        values, copied = self._staging.download(state, len(ids))
        done = self.thread.submit(self._scatter, ids, values, copied, step)
        self._puts_made += 1
        self._puts.append(_Put(self._puts_made, ascending, done, time.monotonic()))
        # Drop puts that are in the rows and in every prefetched batch; no take needs them any more.
        while self._prefetches and self._puts_made - self._prefetches[0].puts_seen > _PREFETCHES_KEPT:
            self._prefetches.popleft()
        seen_by_all = self._prefetches[0].puts_seen if self._prefetches else self._puts_made
        while self._puts and self._puts[0].number <= seen_by_all and self._puts[0].done.done():
            self._puts.popleft()

    def seconds_behind(self) -> float:
        """Age of the oldest unfinished put, in seconds; 0 if there is none."""
        made_at = next((put.made_at for put in self._puts if not put.done.done()), None)
        return 0.0 if made_at is None else time.monotonic() - made_at

    def check(self) -> None:
        """Raise BackgroundError if a thread has failed."""
        self.thread.check()
        self._rows.blocks.check()

    def _claim(self, ids: Int64s) -> _Prefetch | None:
        """Return the oldest prefetch of exactly these ids; drop it and all older ones, since batches come in order."""
        for place, prefetch in enumerate(self._prefetches):
            if np.array_equal(prefetch.ids, ids):
                for _ in range(place + 1):
                    self._prefetches.popleft()
                return prefetch
        return None

    def _gather(self, ids: Int64s, *, wait: bool = True) -> StagedRows | None:
        staged = self._staging.rows(len(ids))
        if not self._rows.gather(ids, staged.values.numpy(), staged.packed[-1].numpy(), wait=wait):
            return None
        self._staging.upload(staged)
        return staged

    def _gather_now(self, ids: Int64s) -> StagedRows:
        """Gather rows that were not prefetched, after the puts that they depend on."""
        if not self._rows.blocks.in_memory().all():
            # Wait for all puts, including other rows': the blocks that they release make room for the missing ones.
            self.thread.drain()
        under_way = [put for put in self._puts if not put.done.done()]
        ascending = np.sort(ids) if under_way else ids
        for put in under_way:
            if _meet(ascending, put.ascending_ids):
                self._result(put.done)
        staged = self._gather(ids)
        assert staged is not None
        return staged

    def _forward(self, prefetch: _Prefetch, staged: StagedRows) -> None:
        """Replace staged rows that puts have changed or will change after the prefetch."""
        stale = np.zeros(len(prefetch.ids), dtype=bool)
        for put in self._puts:
            if put.number > prefetch.puts_seen and _meet(prefetch.ascending_ids, put.ascending_ids):
                self._result(put.done)
                stale |= np.isin(prefetch.ids, put.ascending_ids)
        if stale.any():
            fresh = self._staging.rows(int(stale.sum()))
            self._rows.gather(prefetch.ids[stale], fresh.values.numpy(), fresh.packed[-1].numpy())
            staged.packed.numpy()[:, stale] = fresh.packed.numpy()
            self._staging.upload(staged)

    def _scatter(self, ids: Int64s, values: torch.Tensor, copied: torch.cuda.Event | None, step: int) -> None:
        if copied is not None:
            wait_for(copied)
        refused = ids[self._rows.scatter(ids, values.numpy(), step)]
        self.refused_rows += len(refused)
        if len(refused):
            if self._selection is not None:
                refused = self._selection.ids_at(refused)
            named = ", ".join(map(str, refused[:_IDS_LOGGED].tolist())) + (", …" if len(refused) > _IDS_LOGGED else "")
            told = "put of step %d: %d of %d new rows are not finite and were refused; sample ids: %s"
            _log.warning(told, step, len(refused), len(ids), named)
        self._rows.blocks.finished(step)

    def _result(self, future: Future[T]) -> T:
        if not future.done():
            wait([future])
        self.check()  # raises a failure with its advice
        return future.result()


@kernel(f"bool_({IDS}, {IDS})")
def _meet(ascending: Int64s, other: Int64s) -> bool:
    """Return whether two ascending vectors share an id. Most batches share none, so a take usually costs only this."""
    i, j = 0, 0
    while i < ascending.shape[0] and j < other.shape[0]:
        left, right = ascending[i], other[j]
        if left == right:
            return True
        i += left < right  # branch-free: the branch would be unpredictable
        j += right < left
    return False


def checked_ids(sample_ids: SampleIds, owned: range) -> Int64s:
    """Return a private copy of `sample_ids`, int64 [b]; b may be 0.

    Raises SampleIdError for a wrong dtype, more than one dimension, a GPU tensor, or an id outside `owned`.
    """
    if isinstance(sample_ids, torch.Tensor):
        if sample_ids.device.type != "cpu":
            raise SampleIdError(f"sample ids are on {sample_ids.device}; keep them on the CPU, where the rows are")
        sample_ids = sample_ids.numpy()
    # Copy: the caller may reuse its buffer before a background thread reads the ids.
    ids = np.array(sample_ids)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise SampleIdError(f"sample ids are {ids.dtype} of shape {ids.shape}; pass int64 of shape [b]")
    if len(ids) and (ids.min() < owned.start or ids.max() >= owned.stop):
        outside = ids[(ids < owned.start) | (ids >= owned.stop)]
        raise SampleIdError(
            f"sample id {outside[0]} is outside {owned.start} … {owned.stop - 1}: the store holds {len(owned):,} "
            "samples. Pass ids of the store's dataset, and to a rank those of its canonical shards"
        )
    return ids


def sorted_without_repeats(ids: Int64s) -> Int64s:
    """Return `ids` in ascending order. Raises DuplicateIdError naming the first repeated id."""
    ascending = np.sort(ids)
    repeated = ascending[1:] == ascending[:-1]
    if repeated.any():
        twice = ascending[1:][repeated][0]
        places = np.flatnonzero(ids == twice).tolist()
        raise DuplicateIdError(f"sample id {twice} occurs at positions {places} of one put; give each sample one row")
    return ascending
