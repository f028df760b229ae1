"""The state of every sample while a run trains: read before a step, written after it, both beside the computation."""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import torch

from .background import BackgroundThread
from .durable import Description, Repository, Snapshot, read_columns
from .errors import StepError, StoreClosedError
from .in_flight import InFlight, Prefetch
from .lock import WriterLock
from .rows import ResidentRows
from .sample_ids import Flags, IdArray, SampleIds, checked_ids, sorted_without_repeats
from .schema import Schema
from .staging import StagedRows, Staging

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MAX_STEP = 2**32 - 1
"""last_step is a uint32."""
_IDS_LOGGED = 20
_ROWS_LOADED_AT_ONCE = 1 << 20
"""Bounds the memory that opening a store needs beside its rows."""


class StateStore:
    """The one writer of a run's state; all rows resident in RAM. Use `create` or `open`.

    A background thread gathers prefetched rows and writes new ones, in the order of the calls; a second one writes
    snapshots. Nothing is durable but what a snapshot has committed. Call it from one thread. A failure in the
    background is raised as BackgroundError by the next call, and by every call after it.

    samples: number of rows. fields: names of the float32 fields.
    last_snapshot: the newest one committed, or the one that the store was opened at.
    refused_rows: rows not written, since this store was opened, because a new value was not finite.
    """

    def __init__(
        self, repository: Repository, description: Description, rows: ResidentRows, staging: Staging, lock: WriterLock,
        last_snapshot: Snapshot,
    ) -> None:  # fmt: skip
        self.path = repository.path
        self.samples = description.samples
        self.fields = description.schema.names
        self.last_snapshot = last_snapshot
        self.refused_rows = 0
        self._repository, self._description, self._lock = repository, description, lock
        self._rows, self._staging, self._in_flight = rows, staging, InFlight()
        self._process = os.getpid()
        self._closed = False
        self._rows_thread = BackgroundThread("rows")
        self._snapshot_thread = BackgroundThread("snapshot")
        self._last_snapshot_step = last_snapshot.step

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], samples: int, fields: Mapping[str, float], *,
        block_rows: int, dataset_fingerprint: str, device: str | torch.device = "cpu",
    ) -> Self:  # fmt: skip
        """Make a store at `path` with every sample at its initial values, and take the writer lock.

        fields: path of each float32 field -> its value for a sample never seen; the store adds `visits` and
        `last_step`. block_rows: rows in one zarr chunk, the unit of writing. The first snapshot is `step-0`.
        Raises StoreExistsError, StoreLockedError, FieldError for a bad name or value, ValueError for a bad size.
        """
        path = Path(path)
        description = Description(samples, Schema(dict(fields)), block_rows, dataset_fingerprint)
        with ExitStack() as undo:
            lock = WriterLock(path)
            undo.callback(lock.release)
            # What can fail for want of memory or of a device comes first, and then leaves no repository behind.
            staging = Staging(description.schema, device)
            rows = ResidentRows(description.schema, samples, block_rows)
            repository = Repository.create(path, description)
            store = cls(repository, description, rows, staging, lock, repository.resolve("latest"))
            undo.pop_all()
        return store

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, at: str = "latest", samples: int, fields: Mapping[str, float],
        dataset_fingerprint: str, device: str | torch.device = "cpu",
    ) -> Self:  # fmt: skip
        """Resume the store at `path` from a tag, a snapshot id or `latest`, and take the writer lock.

        Snapshots made after that one are undone: the next steps will be made again. Reads all rows into RAM.
        Raises StoreNotFoundError, SnapshotNotFoundError, StoreLockedError, and StoreMismatchError, before anything is
        undone, where the store was made for another dataset, number of samples or fields.
        """
        repository = Repository.open(Path(path))
        with ExitStack() as undo:
            lock = WriterLock(repository.path)
            undo.callback(lock.release)
            snapshot = repository.resolve(at)
            description = repository.describe(snapshot)
            asked_for = Schema(dict(fields))
            description.check_same(
                samples=samples, schema=asked_for, dataset_fingerprint=dataset_fingerprint, path=repository.path
            )
            staging = Staging(description.schema, device)
            rows = _loaded_rows(repository, description, snapshot)
            repository.undo_after(snapshot)
            store = cls(repository, description, rows, staging, lock, snapshot)
            undo.pop_all()
        return store

    def prefetch(self, sample_ids: SampleIds) -> None:
        """Say that `take` will be called with exactly these ids, int64 [b]; their rows are gathered meanwhile.

        A hint: it changes no result, may come several batches ahead, and need not come true.
        Raises SampleIdError.
        """
        self._check_usable()
        ids = checked_ids(sample_ids, self.samples)
        self._in_flight.add_prefetch(ids, self._rows_thread.submit(self._gather, ids))

    def take(self, sample_ids: SampleIds) -> dict[str, torch.Tensor]:
        """Return the rows of `sample_ids`, int64 [b], in their order: every field, float32 [b], and visits, int32 [b].

        Tensors are on the store's device and the caller's own. Every put made before is seen, also one still under way:
        only a put that shares ids with this batch is waited for. Raises SampleIdError, BackgroundError.
        """
        self._check_usable()
        ids = checked_ids(sample_ids, self.samples)
        prefetch = self._in_flight.claim(ids)
        if prefetch is None:
            for put, _ in self._in_flight.unseen_puts(ids, None):
                self._result(put.done)
            staged = self._gather(ids)
        else:
            staged = self._result(prefetch.staged)
            self._forward(prefetch, staged)
        return self._staging.to_device(staged)

    def put(self, sample_ids: SampleIds, state: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Write new rows; returns at once, and the caller may reuse its tensors and ids.

        sample_ids: int64 [b], no id twice. state: every field, float32 [b], on any device; `visits` in it is ignored:
        the store counts visits itself. step: number of the step that made this state, from 1; kept as last_step.
        A row with a value that is not finite is refused: its old row, visits and last_step stay; it is counted in
        `refused_rows` and its id logged.
        Raises SampleIdError, DuplicateIdError, FieldError, StepError, BackgroundError.
        """
        self._check_usable()
        ids = checked_ids(sample_ids, self.samples)
        ascending = sorted_without_repeats(ids)
        _check_step(step)
        values, copied = self._staging.from_state(state, len(ids))
        done = self._rows_thread.submit(self._scatter, ids, values, copied, step)
        self._in_flight.add_put(ascending, done)

    def snapshot(self, step: int, *, epoch: int, config_hash: str = "") -> "Future[Snapshot]":
        """Make the state as all puts so far leave it durable, as `step-N`; returns at once, before it is written.

        The future gives the Snapshot once it is committed, and cannot be cancelled. Puts made later are not in it.
        step: of the last put, from 1, after the last snapshot's. epoch, config_hash: kept with the snapshot.
        Raises StepError, BackgroundError.
        """
        self._check_usable()
        _check_step(step)
        if step <= self._last_snapshot_step:
            raise StepError(
                f"snapshot of step {step} after one of step {self._last_snapshot_step}; a snapshot's step must be "
                "greater than the last one's, or the store be opened at an earlier snapshot"
            )
        self._last_snapshot_step = step
        changed = self._rows_thread.submit(self._rows.cut)

        def commit() -> Snapshot:
            self.last_snapshot = self._repository.commit(
                changed.result(),
                step=step,
                epoch=epoch,
                config_hash=config_hash,
                dataset_fingerprint=self._description.dataset_fingerprint,
            )
            return self.last_snapshot

        return self._snapshot_thread.submit(commit)

    def flush(self) -> None:
        """Wait until every put is in the rows and every snapshot asked for is committed; raises BackgroundError."""
        self._check_usable()
        self._rows_thread.drain()
        self._snapshot_thread.drain()
        self._check_usable()

    def close(self) -> None:
        """Finish what is under way, end the threads and release the lock; closing twice does nothing.

        Rows put after the last snapshot are lost. Raises BackgroundError for a failure that no call has raised yet.
        """
        self._check_process()
        if self._closed:
            return
        self._closed = True
        with ExitStack() as ends:
            ends.callback(self._lock.release)
            ends.callback(self._snapshot_thread.close)
            ends.callback(self._rows_thread.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise StoreClosedError(f"the store {self.path} is closed; open it again")
        self._rows_thread.check()
        self._snapshot_thread.check()

    def _check_process(self) -> None:
        # A fork copies neither the threads nor their locks; waiting for them would take for ever.
        if os.getpid() != self._process:
            raise StoreClosedError(
                f"the store {self.path} belongs to process {self._process} and is used in {os.getpid()}, forked from "
                "it; start that process with spawn, and let one process write"
            )

    def _gather(self, ids: IdArray) -> StagedRows:
        staged = self._staging.rows(len(ids))
        self._rows.gather(ids, staged.values.numpy(), staged.visits.numpy())
        return staged

    def _forward(self, prefetch: Prefetch, staged: StagedRows) -> None:
        """Replace the staged rows that a put made after the prefetch has changed, or is about to."""
        stale = np.zeros(len(prefetch.ids), dtype=bool)
        for put, shared in self._in_flight.unseen_puts(prefetch.ids, prefetch):
            self._result(put.done)
            stale |= shared
        if stale.any():
            fresh = self._gather(prefetch.ids[stale])
            staged.values.numpy()[:, stale] = fresh.values.numpy()
            staged.visits.numpy()[stale] = fresh.visits.numpy()

    def _scatter(self, ids: IdArray, values: torch.Tensor, copied: torch.cuda.Event | None, step: int) -> None:
        if copied is not None:
            copied.synchronize()
        refused = self._rows.scatter(ids, values.numpy(), step)
        if refused.any():
            self._note_refused(ids, refused, step)

    def _note_refused(self, ids: IdArray, refused: Flags, step: int) -> None:
        count = int(refused.sum())
        self.refused_rows += count
        named = ", ".join(map(str, ids[refused][:_IDS_LOGGED].tolist())) + (", …" if count > _IDS_LOGGED else "")
        _log.warning(
            "put of step %d: %d of %d new rows are not finite and were refused; sample ids: %s",
            step, count, len(ids), named,
        )  # fmt: skip

    def _result(self, future: "Future[T]") -> T:
        wait([future])
        self._check_usable()  # raises a failure with the advice that belongs to it
        return future.result()


def _check_step(step: int) -> None:
    if not 1 <= step <= _MAX_STEP:
        raise StepError(f"step {step} is outside 1 … {_MAX_STEP}; the first step is number 1")


def _loaded_rows(repository: Repository, description: Description, snapshot: Snapshot) -> ResidentRows:
    rows = ResidentRows(description.schema, description.samples, description.block_rows)
    group = repository.group(snapshot)
    blocks_at_once = max(1, _ROWS_LOADED_AT_ONCE // description.block_rows)
    for start in range(0, description.samples, blocks_at_once * description.block_rows):
        stop = min(start + blocks_at_once * description.block_rows, description.samples)
        rows.load(start, read_columns(group, description, start, stop))
    return rows
