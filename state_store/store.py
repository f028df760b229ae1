"""The state of every sample during training, read before each step and written after it, in the background."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import torch

from ..lock import FileLock, LockedError
from .background import BackgroundThread
from .commit import ColumnPart
from .durable import Repository
from .errors import SnapshotError, StepError, StoreClosedError, StoreLockedError
from .history import Snapshot
from .in_flight import InFlight, Prefetch
from .loading import rows_at, slots_within
from .ranks import Alone, Ranks, agreement
from .rows import Rows
from .sample_ids import Flags, IdArray, SampleIds, checked_ids, sorted_without_repeats
from .schema import Description, Schema
from .staging import StagedRows, Staging
from .windowed import Window, WindowedBlocks
from .working_tier import discard

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MAX_STEP = 2**32 - 1
"""last_step is a uint32."""
_IDS_LOGGED = 20


class StateStore:
    """The only writer of a run's state, or of one rank's share of it. Use `create` or `open`.

    One background thread gathers prefetched rows and writes new ones, in call order; a second writes snapshots; with a
    memory budget, a third reads and writes blocks. Only committed snapshots are durable. Call it from one thread. After
    a failure in the background, the next call and every later one raises BackgroundError; for a failed snapshot, see
    `snapshot`.

    samples: number of rows over all ranks. owned: ids of this rank. fields: names of the float32 fields.
    last_snapshot: the newest committed snapshot, or the one that the store was opened at.
    refused_rows: rows rejected since the store was opened because a new value was not finite.

    With several ranks, all of them call `create`, `open`, `snapshot`, `retain` and `close`, in the same order.
    """

    def __init__(
        self, repository: Repository, description: Description, rows: Rows, windowed: WindowedBlocks | None,
        staging: Staging, lock: FileLock | None, ranks: Ranks, last_snapshot: Snapshot,
    ) -> None:  # fmt: skip
        self.path = repository.path
        self.samples = description.samples
        self.owned = rows.owned
        self.fields = description.schema.names
        self.last_snapshot = last_snapshot
        self.refused_rows = 0
        self._repository, self._description, self._lock, self._ranks = repository, description, lock, ranks
        self._rows, self._windowed, self._staging, self._in_flight = rows, windowed, staging, InFlight()
        self._process = os.getpid()
        self._closed = False
        self._rows_thread = BackgroundThread("rows")
        self._snapshot_thread = BackgroundThread("snapshot", goes_on=True)
        self._writes: list[tuple[int, Future[Snapshot]]] = []
        """Requested snapshots that are neither written nor failed, with their steps."""

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], samples: int, fields: Mapping[str, float], *,
        block_rows: int, dataset_fingerprint: str, device: str | torch.device = "cpu",
        memory_budget: int | None = None, ranks: Ranks | None = None, owned: range | None = None,
    ) -> Self:  # fmt: skip
        """Create a store at `path` with every sample at its initial values, and take the writer lock.

        fields: path of each float32 field -> its initial value; the store adds `visits` and `last_step`. block_rows:
        rows per zarr chunk, the unit of writing. The first snapshot is `step-0`.
        memory_budget: bytes of RAM for rows. All rows are resident if it is None or large enough; otherwise see
        `expect`.
        ranks, owned: the processes that share the store, and the ids of this one's rows, in whole blocks.
        Raises StoreExistsError, StoreLockedError, MemoryBudgetError, FieldError for a bad name or value, ValueError for
        a bad size.
        """
        path = Path(path)
        return cls._assemble(
            path,
            lambda: Description(samples, Schema(dict(fields)), block_rows, dataset_fingerprint),
            lambda description: Repository.create(path, description).resolve("latest"),
            device, memory_budget, ranks, owned,
        )  # fmt: skip

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, at: str = "latest", samples: int, fields: Mapping[str, float],
        dataset_fingerprint: str, device: str | torch.device = "cpu",
        memory_budget: int | None = None, ranks: Ranks | None = None, owned: range | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> Self:  # fmt: skip
        """Resume the store at `path` from a tag, a snapshot id or `latest`, and take the writer lock.

        Undoes later snapshots, since their steps will be repeated. Drops damaged earlier ones from the history, with a
        warning each, because `retain` deletes nothing while it has to keep one.
        Reads all rows into RAM, or none with a memory budget. The number of ranks may have changed.
        confirm: called on rank 0 once the lock is held and before anything is undone; an exception aborts the opening.
        Raises StoreNotFoundError, SnapshotNotFoundError, StoreLockedError, MemoryBudgetError; StoreMismatchError,
        before anything is undone, if the store was created for another dataset, number of samples or fields.
        """
        path = Path(path)

        def description() -> Description:
            repository = Repository.open(path)
            repository.description.check_same(
                samples=samples, schema=Schema(dict(fields)), dataset_fingerprint=dataset_fingerprint, path=path
            )
            repository.resolve(at)
            return repository.description

        def begin(_: Description) -> Snapshot:
            confirm()
            repository = Repository.open(path)
            repository.repair()
            return repository.resolve(at)

        return cls._assemble(path, description, begin, device, memory_budget, ranks, owned)

    @classmethod
    def _assemble(
        cls, path: Path, describe: Callable[[], Description], begin: Callable[[Description], Snapshot],
        device: str | torch.device, memory_budget: int | None, ranks: Ranks | None, owned: range | None,
    ) -> Self:  # fmt: skip
        """Take the lock, create or find the first snapshot on rank 0, then load each rank's rows.

        If a rank fails, all do. The store is created or undone only when nothing else can fail.
        """
        ranks = ranks or Alone()
        with ExitStack() as undo:
            lock, snapshot = None, None
            with agreement(ranks):
                description = describe()
                if ranks.rank == 0:
                    lock = _locked(path)
                    undo.callback(lock.release)
                    discard(path)
                share = range(description.samples) if owned is None else owned
                staging = Staging(description.schema, device)
                slots = slots_within(memory_budget, description, share)
            with agreement(ranks):
                if ranks.rank == 0:
                    snapshot = begin(description)
            snapshot = ranks.broadcast(snapshot)
            with agreement(ranks):
                repository = Repository.open(path)
                rows, windowed = rows_at(repository, description, snapshot, share, slots, ranks.rank)
                if windowed is not None:
                    undo.callback(windowed.close)
            with agreement(ranks):
                if ranks.rank == 0:
                    repository.undo_after(snapshot)
                    repository.forget_damaged()
            store = cls(repository, description, rows, windowed, staging, lock, ranks, snapshot)
            undo.pop_all()
        return store

    def expect(self, windows: Iterable[Window]) -> None:
        """Announce the blocks that coming steps use, so that they are read ahead and written back in time.

        windows: ordered by first step, each with first_step and last_step (inclusive, numbered as in `put`) and blocks,
        int64 [any], numbered over all ranks: id // block_rows. Consumed lazily, so the iterable may be endless. A
        hint that changes no result: rows outside the windows are read when taken, and `take` waits for them.
        Does nothing if all rows are resident.
        """
        self._check_usable()
        if self._windowed is not None:
            self._windowed.expect(windows)

    @property
    def write_backlog(self) -> float:
        """Seconds since the oldest put that is not yet in the rows; 0 if there is none."""
        return self._in_flight.seconds_behind()

    @property
    def blocks_read(self) -> int:
        """Blocks read into memory since the store was opened; 0 if all rows are resident."""
        return 0 if self._windowed is None else self._windowed.blocks_read

    @property
    def blocks_written(self) -> int:
        """Blocks written back from memory to the working tier since the store was opened."""
        return 0 if self._windowed is None else self._windowed.blocks_written

    def prefetch(self, sample_ids: SampleIds) -> None:
        """Announce a `take` of exactly these ids, int64 [b], and gather their rows in the background.

        This is a hint: it changes no result and the `take` need not follow. At most 16 batches are kept.
        Raises SampleIdError.
        """
        self._check_usable()
        ids = checked_ids(sample_ids, self.owned)
        self._in_flight.add_prefetch(ids, self._rows_thread.submit(self._gather, ids, wait=False))

    def take(self, sample_ids: SampleIds) -> dict[str, torch.Tensor]:
        """Return the rows of `sample_ids`, int64 [b], in order: every field, float32 [b], and visits, int32 [b].

        The tensors are on the store's device and belong to the caller. Every earlier put is visible, even if
        unfinished; `take` waits only for puts that share ids with this batch.
        Raises SampleIdError, BackgroundError. With a memory budget also MemoryBudgetError, and OSError or
        DamagedChunkError if a block cannot be fetched; the call may then be retried.
        """
        self._check_usable()
        ids = checked_ids(sample_ids, self.owned)
        prefetch = self._in_flight.claim(ids)
        staged = None if prefetch is None else self._result(prefetch.staged)
        if prefetch is None or staged is None:
            staged = self._gather_now(ids)
        else:
            self._forward(prefetch, staged)
        return self._staging.as_state(staged)

    def put(self, sample_ids: SampleIds, state: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Write new rows. Returns at once; the caller may reuse its tensors and ids.

        sample_ids: int64 [b], no duplicates. state: every field, float32 [b], on any device; `visits` is ignored
        because the store counts visits itself. step: number of the step that produced this state, from 1; stored as
        last_step. Rejects a row with a value that is not finite: the old row, visits and last_step stay, `refused_rows`
        is incremented and the id is logged.
        Raises SampleIdError, DuplicateIdError, FieldError, StepError, BackgroundError.
        """
        self._check_usable()
        ids = checked_ids(sample_ids, self.owned)
        ascending = sorted_without_repeats(ids)
        _check_step(step)
        values, copied = self._staging.download(state, len(ids))
        done = self._rows_thread.submit(self._scatter, ids, values, copied, step)
        self._in_flight.add_put(ascending, done)

    def snapshot(self, step: int, *, epoch: int, config_hash: str = "") -> "Future[Snapshot]":
        """Save the state after all puts so far as snapshot `step-N`. Returns at once, before it is written.

        The future returns the Snapshot once it is committed, and cannot be cancelled. Later puts are not included.
        step: of the last put, from 1, after the previous snapshot's. epoch, config_hash: stored with the snapshot.
        If the previous snapshot is still being written, this cut and later puts wait for it.

        If writing fails, for example on a full disk, the future raises SnapshotError. The previous snapshot and the
        rows in memory are intact, and the next snapshot includes the unsaved rows. If the future is never queried, the
        next `flush` or `close` raises the failure; so do `snapshot` and `retain` in a run of one process.
        Raises StepError, BackgroundError.
        """
        self._check_usable()
        _check_step(step)
        self._writes = [(at, write) for at, write in self._writes if not write.done()]
        newest = max(self.last_snapshot.step, *(at for at, _ in self._writes), 0)
        if step <= newest:
            raise StepError(
                f"cannot snapshot step {step} after step {newest}; use a later step, or open the store at an earlier "
                "snapshot"
            )
        self._raise_unseen_failure()
        cut = self._rows_thread.submit(self._cut, self._writes[-1][1] if self._writes else None)
        write = self._snapshot_thread.submit(self._write_snapshot, cut, step=step, epoch=epoch, config_hash=config_hash)
        self._writes.append((step, write))
        return write

    def retain(self, keep_last: int, keep_every: int = 0) -> "Future[None]":
        """Delete old snapshots and free their disk space, in the background, after all requested snapshots.

        Keeps the newest `keep_last` (at least 1), those whose step is a multiple of `keep_every` (0: none), and step-0.
        Readers of a kept snapshot are not disturbed. Raises ValueError, BackgroundError.
        """
        self._check_usable()
        self._raise_unseen_failure()
        if keep_last < 1 or keep_every < 0:
            raise ValueError(f"keep_last {keep_last} must be at least 1, and keep_every {keep_every} at least 0")
        return self._snapshot_thread.submit(self._delete_old_snapshots, keep_last, keep_every)

    def flush(self) -> None:
        """Wait until every put is in the rows and every requested snapshot is committed; raises as they do."""
        self._check_usable()
        wait([self._rows_thread.submit(lambda: None), self._snapshot_thread.submit(lambda: None)])
        self._check_usable()
        self._snapshot_thread.check()

    def close(self) -> None:
        """Finish pending work, end the threads and release the lock. Closing twice does nothing.

        Loses rows put after the last snapshot. Raises BackgroundError for a failure that no call has raised yet.
        """
        self._check_process()
        if self._closed:
            return
        self._closed = True
        with ExitStack() as ends:
            if self._lock is not None:
                ends.callback(self._lock.release)
            if self._windowed is not None:
                ends.callback(self._windowed.close)
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
        if self._windowed is not None:
            self._windowed.check()

    def _raise_unseen_failure(self) -> None:
        # Only with one rank: otherwise this rank would miss the collective calls that the others are about to make.
        if self._ranks.world == 1:
            self._snapshot_thread.check()

    def _check_process(self) -> None:
        # A fork copies neither the threads nor their locks; waiting for them would block forever.
        if os.getpid() != self._process:
            raise StoreClosedError(
                f"the store {self.path} belongs to process {self._process} and is used in {os.getpid()}, forked from "
                "it; start that process with spawn, and let one process write"
            )

    def _gather(self, ids: IdArray, *, wait: bool = True) -> StagedRows | None:
        staged = self._staging.rows(len(ids))
        if not self._rows.gather(ids, staged.values.numpy(), staged.visits.numpy(), wait=wait):
            return None
        self._staging.upload(staged)
        return staged

    def _gather_now(self, ids: IdArray) -> StagedRows:
        """Gather rows that were not prefetched, after the puts that they depend on."""
        if self._windowed is not None:
            # Wait for all puts, including other rows': blocks that those puts release make room for the missing ones.
            self._rows_thread.drain()
        for put in self._in_flight.puts_under_way(ids):
            self._result(put.done)
        staged = self._gather(ids)
        assert staged is not None
        return staged

    def _forward(self, prefetch: Prefetch, staged: StagedRows) -> None:
        """Replace staged rows that puts made after the prefetch have changed or will change."""
        stale = np.zeros(len(prefetch.ids), dtype=bool)
        for put, shared in self._in_flight.puts_after(prefetch):
            self._result(put.done)
            stale |= shared
        if stale.any():
            fresh = self._staging.rows(int(stale.sum()))
            self._rows.gather(prefetch.ids[stale], fresh.values.numpy(), fresh.visits.numpy())
            staged.values.numpy()[:, stale] = fresh.values.numpy()
            staged.visits.numpy()[stale] = fresh.visits.numpy()
            self._staging.upload(staged)

    def _scatter(self, ids: IdArray, values: torch.Tensor, copied: torch.cuda.Event | None, step: int) -> None:
        if copied is not None:
            copied.synchronize()
        refused = self._rows.scatter(ids, values.numpy(), step)
        if refused.any():
            self._note_refused(ids, refused, step)
        if self._windowed is not None:
            self._windowed.finished(step)

    def _cut(self, last_write: "Future[Snapshot] | None") -> None:
        if last_write is not None:
            wait([last_write])
        self._rows.cut()

    def _write_snapshot(self, cut: "Future[None]", *, step: int, epoch: int, config_hash: str) -> Snapshot:
        # Before anything can fail: blocks that were not written may be marked changed again only after the cut.
        wait([cut])

        def parts() -> Iterable[ColumnPart]:
            cut.result()  # raised here, the error reaches all ranks
            yield from self._rows.parts()

        try:
            snapshot = self._repository.commit(
                parts(), base=self.last_snapshot, step=step, epoch=epoch, config_hash=config_hash,
                dataset_fingerprint=self._description.dataset_fingerprint, ranks=self._ranks,
            )  # fmt: skip
        except BaseException:
            self._rows.not_written()
            raise
        self.last_snapshot = snapshot
        self._rows.written()
        if self._windowed is not None:
            self._windowed.follow(snapshot)
        return snapshot

    def _delete_old_snapshots(self, keep_last: int, keep_every: int) -> None:
        self._ranks.gather(None)  # every rank now reads from the newest snapshot
        if self._ranks.rank != 0:
            return
        try:
            self._repository.retain(keep_last, keep_every)
        except Exception as error:
            raise SnapshotError(f"{self.path}: old snapshots could not be deleted: {error}") from error

    def _note_refused(self, ids: IdArray, refused: Flags, step: int) -> None:
        count = int(refused.sum())
        self.refused_rows += count
        named = ", ".join(map(str, ids[refused][:_IDS_LOGGED].tolist())) + (", …" if count > _IDS_LOGGED else "")
        _log.warning(
            "put of step %d: %d of %d new rows are not finite and were refused; sample ids: %s",
            step, count, len(ids), named,
        )  # fmt: skip

    def _result(self, future: "Future[T]") -> T:
        if not future.done():
            wait([future])
        self._check_usable()  # raises a failure with its advice
        return future.result()


def _check_step(step: int) -> None:
    if not 1 <= step <= _MAX_STEP:
        raise StepError(f"step {step} is outside 1 … {_MAX_STEP}; steps count from 1")


def _locked(path: Path) -> FileLock:
    """Take the writer lock, `<repository>.lock`. Readers need none: a committed snapshot never changes."""
    file = path.with_name(path.name + ".lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(file)
    except LockedError as error:
        raise StoreLockedError(
            f"{path} is being written by {error.holder} (lock: {file}). "
            "Wait for it, stop it, or read the store with StateReader, which needs no lock"
        ) from None
