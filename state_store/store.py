"""The state of every sample during training, read before each step and written after it, in the background."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack
from typing import Self

import torch

from ..storage.bucket import Address
from ..storage.lock import LockedError
from ..storage.place import Lock, Place, leased, lock_at, place_of
from ..storage.selection import Selection
from . import errors, history
from .background import BackgroundThread
from .commit import About, ColumnPart
from .durable import Repository
from .history import Snapshot
from .ranks import Ranks, agreement
from .reader import StateReader, read_records
from .rows import Blocks, BlockWindow, Rows
from .schema import VISITS, Description, Schema
from .transfer import SampleIds, Staging, Transfer, checked_ids
from .windowed import WindowedBlocks
from .working_tier import WorkingTier, discard

_MAX_STEP = 2**32 - 1
"""last_step is a uint32."""


class StateStore(AbstractContextManager["StateStore"]):
    """The only writer of a run's state, or of one rank's share of it. Use `create` or `open`, from one thread.

    Background threads gather and write rows, write snapshots and, with a memory budget, move blocks. Only committed
    snapshots are durable. After a failure in the background, the next call and every later one raises BackgroundError;
    for a failed snapshot, see `snapshot`. With several ranks, all of them call `create`, `open`, `snapshot`, `retain`
    and `close`, in the same order.

    samples: number of rows over all ranks. owned: ids of this rank. fields: names of the float32 fields.
    last_snapshot: the newest committed snapshot, or the one that the store was opened at.
    """

    def __init__(
        self,
        path: Place,
        describe: Callable[[], Description],
        begin: Callable[[Place, Description, str | None], Snapshot],
        selection: Selection | None,
        device: str | torch.device,
        memory_budget: int | None,
        ranks: Ranks | None,
        owned: range | None,
        lock: Lock | None,
    ) -> None:
        """Take the lock, unless given; create or find the first snapshot on rank 0; then load each rank's rows.

        If a rank fails, all do. `begin` creates or undoes the store, only once nothing else can fail. Its arguments are
        the path, in a bucket under the lock's lease, and the name of the lock's holding.
        """
        self._ranks = ranks = ranks or Ranks()
        with ExitStack() as undo:
            own, snapshot, writer = None, None, None
            with agreement(ranks):
                description = describe()
                if ranks.rank == 0:
                    if lock is None:
                        own = lock = writer_lock(path)
                        undo.callback(own.release)
                    discard(path)
                    path, writer = leased(path, lock), lock.writer
                owned = range(description.samples) if owned is None else owned
                staging = Staging(description.schema, device)
                slots = _slots_within(memory_budget, description, owned)
            with agreement(ranks):
                if ranks.rank == 0:
                    snapshot = begin(path, description, writer)
            snapshot = ranks.broadcast(snapshot)
            with agreement(ranks):
                repository = Repository(path, writer)
                blocks = _blocks_at(repository, snapshot, owned, slots, ranks.rank)
                undo.callback(blocks.close)
                rows = Rows(description.schema, owned, description.block_rows, blocks, snapshot.step)
            with agreement(ranks):
                if ranks.rank == 0:
                    repository.undo_after(snapshot)
                    repository.forget_damaged()
            undo.pop_all()
        self.path, self.samples = path, description.samples
        self.owned, self.fields = owned, description.schema.names
        self.last_snapshot: Snapshot = snapshot
        self._repository, self._rows, self._lock = repository, rows, own
        self._process = os.getpid()
        self._closed = False
        self._lost: errors.StateStoreError | None = None  # reason why rows that a snapshot needs are lost
        self._transfer = Transfer(rows, staging, selection)
        self._snapshot_thread = BackgroundThread("snapshot", goes_on=True)
        self._writes: list[tuple[int, Future[Snapshot]]] = []
        """Snapshots requested but neither written nor failed, with their steps."""

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str] | Address,
        samples: int,
        fields: Mapping[str, float],
        *,
        block_rows: int,
        dataset_fingerprint: str,
        selection: Selection | None = None,
        device: str | torch.device = "cpu",
        memory_budget: int | None = None,
        ranks: Ranks | None = None,
        owned: range | None = None,
        carried: StateReader | None = None,
        lock: Lock | None = None,
    ) -> Self:
        """Create a store at a path, or an address such as s3://bucket/state, and take the writer lock.

        Every sample is at its initial values.
        fields: path of each float32 field -> its initial value; the store adds `visits` and `last_step`. block_rows:
        rows per zarr chunk, the unit of writing. The first snapshot is `step-0`.
        memory_budget: bytes of RAM for rows. All are resident if it is None or large enough; otherwise see `expect`.
        ranks, owned: the processes that share the store, and the ids of this process's rows, in whole blocks.
        selection: the samples of the dataset that the store holds, if not all. Every id here is then a position among
        them; readers find its folder, `selection`, next to `path` and map positions to ids.
        carried: initial state of the first samples, fields and visits bit for bit; last_step becomes 0.
        lock: the writer lock, if the caller holds it on rank 0 and releases it after `close`; see `writer_lock`.
        Raises StoreExistsError, StoreLockedError, MemoryBudgetError, FieldError for a bad name or value, ValueError for
        a bad size.
        """
        path = place_of(path)

        def describe() -> Description:
            return Description(samples, Schema(dict(fields)), block_rows, dataset_fingerprint, _digest(selection))

        def begin(leased: Place, description: Description, writer: str | None) -> Snapshot:
            parts = () if carried is None else _carried(carried, description)
            return Repository.create(leased, description, writer, parts).resolve("latest")

        return cls(path, describe, begin, selection, device, memory_budget, ranks, owned, lock)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | Address,
        *,
        at: str = "latest",
        samples: int,
        fields: Mapping[str, float],
        dataset_fingerprint: str,
        selection: Selection | None = None,
        device: str | torch.device = "cpu",
        memory_budget: int | None = None,
        ranks: Ranks | None = None,
        owned: range | None = None,
        lock: Lock | None = None,
    ) -> Self:
        """Resume the store at `path` from a tag, a snapshot id or `latest`, and take the writer lock.

        Undoes later snapshots, since their steps will be repeated. Drops damaged earlier snapshots from the history,
        with a warning each, because `retain` deletes nothing while it has to keep a damaged snapshot.
        Reads all rows into RAM, or none with a memory budget. The number of ranks may have changed. lock: as for
        `create`.
        Raises StoreNotFoundError, SnapshotNotFoundError, StoreLockedError, MemoryBudgetError; StoreMismatchError,
        before anything is undone, if the store was created for another dataset, number of samples or fields.
        """
        path = place_of(path)

        def describe() -> Description:
            own = (repository := Repository(path)).description
            asked = Description(samples, Schema(dict(fields)), own.block_rows, dataset_fingerprint, _digest(selection))
            own.check_same(asked, path)
            repository.resolve(at)
            return own

        def begin(leased: Place, _: Description, writer: str | None) -> Snapshot:
            repository = Repository(leased, writer)
            repository.repair()
            return repository.resolve(at)

        return cls(path, describe, begin, selection, device, memory_budget, ranks, owned, lock)

    def expect(self, windows: Iterable[BlockWindow]) -> None:
        """Announce the blocks that coming steps use, so that they are read ahead and written back in time.

        windows: ordered by first step, each with first_step and last_step (inclusive, numbered as in `put`) and blocks,
        int64 [any], numbered over all ranks: id // block_rows. Consumed lazily, so the iterable may be endless. This is
        a hint: `take` waits for rows outside the windows. Does nothing if all rows are resident.
        """
        self._check_usable()
        self._rows.blocks.expect(windows)

    @property
    def refused_rows(self) -> int:
        """Rows rejected since the store was opened because a new value was not finite."""
        return self._transfer.refused_rows

    @property
    def write_backlog(self) -> float:
        """Seconds since the oldest put that is not yet in the rows; 0 if there is none."""
        return self._transfer.seconds_behind()

    @property
    def blocks_read(self) -> int:
        """Blocks read into memory since the store was opened; 0 if all rows are resident."""
        return self._rows.blocks.blocks_read

    @property
    def blocks_written(self) -> int:
        """Blocks written back from memory to the working tier since the store was opened."""
        return self._rows.blocks.blocks_written

    def prefetch(self, sample_ids: SampleIds) -> None:
        """Announce a `take` of exactly these ids, int64 [b], and gather their rows in the background.

        A hint: it changes no result, and the `take` need not follow. At most 16 batches are kept. Raises SampleIdError.
        """
        self._check_usable()
        self._transfer.prefetch(checked_ids(sample_ids, self.owned))

    def take(self, sample_ids: SampleIds) -> dict[str, torch.Tensor]:
        """Return the rows of `sample_ids`, int64 [b], in order: every field, float32 [b], and visits, int32 [b].

        The tensors are on the store's device and belong to the caller. Every earlier put is visible, even if
        unfinished; `take` waits only for puts that share ids with this batch.
        Raises SampleIdError, BackgroundError. With a memory budget also MemoryBudgetError, and OSError or
        DamagedChunkError if a block cannot be fetched; the call may then be retried.
        """
        self._check_usable()
        return self._transfer.take(checked_ids(sample_ids, self.owned))

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
        _check_step(step)
        self._transfer.put(ids, state, step)

    def snapshot(self, step: int, *, epoch: int, config_hash: str = "") -> Future[Snapshot]:
        """Save the state after all puts so far as snapshot `step-N`. Returns at once, before it is written.

        The future returns the Snapshot once it is committed, and cannot be cancelled. If the previous snapshot is still
        being written, this cut and later puts wait for it.
        step: of the last put, from 1, after the previous snapshot's. epoch, config_hash: stored with the snapshot.

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
            raise errors.StepError(
                f"cannot snapshot step {step} after step {newest}; use a later one, or open the store at an earlier one"
            )
        self._raise_unseen_failure()
        cut = self._transfer.thread.submit(self._cut, self._writes[-1][1] if self._writes else None)
        made_for = self._repository.description.dataset_fingerprint
        about = {"step": step, "epoch": epoch, "config_hash": config_hash, "dataset_fingerprint": made_for}
        write = self._snapshot_thread.submit(self._write_snapshot, cut, about)
        self._writes.append((step, write))
        return write

    def retain(self, keep_last: int, keep_every: int = 0, keep_early: int = 0) -> Future[None]:
        """Delete old snapshots and free their disk space, in the background, after all requested snapshots.

        Keeps the newest `keep_last` (at least 1), multiples of `keep_every` steps (0: none), step-0, and the first
        `keep_early` of each tenfold of steps, as `early_steps` says. Readers of a kept snapshot are not disturbed.
        Raises ValueError, BackgroundError.
        """
        self._check_usable()
        self._raise_unseen_failure()
        if keep_last < 1 or keep_every < 0:
            raise ValueError(f"keep_last {keep_last} must be at least 1, and keep_every {keep_every} at least 0")
        if not 0 <= keep_early <= 9:
            raise ValueError(f"keep_early {keep_early} is not within 0 … 9")
        return self._snapshot_thread.submit(self._delete_old_snapshots, keep_last, keep_every, keep_early)

    def flush(self) -> None:
        """Wait until every put is in the rows and every requested snapshot is committed; raise their errors."""
        self._check_usable()
        self._transfer.thread.drain()
        self._snapshot_thread.drain()
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
            ends.callback(self._rows.blocks.close)
            ends.callback(self._snapshot_thread.close)
            ends.callback(self._transfer.thread.close)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise errors.StoreClosedError(f"the store {self.path} is closed; open it again")
        self._transfer.check()
        if self._lost is not None:
            raise errors.BackgroundError(
                f"{self.path}: no later snapshot can be written, because rows that it needs are lost: {self._lost}. "
                "Resume the run, which goes back to the newest intact checkpoint; if you have a copy of the file, "
                "restore it first"
            ) from self._lost

    def _raise_unseen_failure(self) -> None:
        # Only with one rank: otherwise this rank would miss the collective calls that the others are about to make.
        if self._ranks.world == 1:
            self._snapshot_thread.check()

    def _check_process(self) -> None:
        # A fork copies neither the threads nor their locks; waiting for them would block forever.
        if os.getpid() != self._process:
            raise errors.StoreClosedError(
                f"the store {self.path} belongs to process {self._process} and is used in {os.getpid()}, forked from "
                "it; start that process with spawn, and let one process write"
            )

    def _cut(self, last_write: Future[Snapshot] | None) -> None:
        if last_write is not None:
            wait([last_write])
        self._rows.cut()

    def _write_snapshot(self, cut: Future[None], about: About) -> Snapshot:
        # First, before anything can fail: unwritten blocks may be marked changed again only after the cut.
        wait([cut])

        def parts(base: Snapshot) -> Iterator[ColumnPart]:
            cut.result()  # raised here, the error reaches all ranks
            try:
                yield from self._rows.parts(base.step)
            except errors.DAMAGE as error:
                self._lost = error
                raise

        try:
            snapshot = self._repository.commit(parts, base=self.last_snapshot, about=about, ranks=self._ranks)
        except BaseException:
            self._rows.not_written()
            raise
        self.last_snapshot = snapshot
        self._rows.written(snapshot.step)
        self._rows.blocks.follow(snapshot)
        return snapshot

    def _delete_old_snapshots(self, *keep: int) -> None:
        self._ranks.gather(None)  # every rank now reads from the newest snapshot
        if self._ranks.rank == 0:
            self._repository.retain(*keep)


def _carried(reader: StateReader, description: Description) -> Iterator[ColumnPart]:
    """Yield the rows of another state in whole blocks of this one."""
    for start in range(0, reader.samples, description.block_rows):
        stop = min(start + description.block_rows, reader.samples)
        yield ColumnPart(start, reader.rows(start, stop, (*reader.fields, VISITS)))


def _digest(selection: Selection | None) -> str | None:
    return None if selection is None else selection.about.ids


def _check_step(step: int) -> None:
    if not 1 <= step <= _MAX_STEP:
        raise errors.StepError(f"step {step} is outside 1 … {_MAX_STEP}; steps count from 1")


def writer_lock(path: Place) -> Lock:
    """Take the writer lock, `<repository>.lock`; readers need no lock. Raises StoreLockedError, OSError."""
    file = path.with_name(path.name + ".lock")
    try:
        return lock_at(file, lambda: history.taken_over(path), lambda: history.last_writer(path))
    except LockedError as error:
        raise errors.StoreLockedError(
            f"{path} is being written by {error.holder} (lock: {file}). "
            "Wait for it, stop it, or read the store with StateReader, which needs no lock"
        ) from None


def _slots_within(memory_budget: int | None, description: Description, owned: range) -> int | None:
    """Return how many blocks a budget in bytes holds, or None if it is None or holds all rows of `owned`.

    Raises MemoryBudgetError for a budget below one block, ValueError for a range that is not in whole blocks.
    """
    block_rows, samples, row_bytes = description.block_rows, description.samples, 4 * description.schema.row_words
    whole = owned.start % block_rows == 0 and (owned.stop % block_rows == 0 or owned.stop == samples)
    if not (whole and 0 <= owned.start < owned.stop <= samples and owned.step == 1):
        raise ValueError(
            f"the ids {owned.start} … {owned.stop - 1} are not whole blocks of {block_rows:,} rows of {samples:,} "
            "samples; give a rank the ids of its canonical shards"
        )
    if memory_budget is None or len(owned) * row_bytes <= memory_budget:
        return None
    if memory_budget < block_rows * row_bytes:
        raise errors.MemoryBudgetError(
            f"a memory budget of {memory_budget:,} bytes is less than a block of {block_rows:,} rows of {row_bytes} "
            f"bytes. Raise it to {block_rows * row_bytes:,} or more; the order's windows need several blocks"
        )
    return memory_budget // (block_rows * row_bytes)


def _blocks_at(repository: Repository, snapshot: Snapshot, owned: range, slots: int | None, rank: int) -> Blocks:
    """Return the blocks of the ids `owned` as of `snapshot`; `slots` of them in memory, or all if it is None."""
    description = repository.description
    schema, block_rows = description.schema, description.block_rows
    if slots is not None:
        tier = WorkingTier(repository, owned, snapshot, rank)
        return WindowedBlocks(schema, owned, block_rows, slots, tier, snapshot.step)
    resident = Blocks(schema, len(owned), block_rows)
    if snapshot.bytes_written or snapshot.step > 0:
        group = repository.group(snapshot)
        rows_at_once = max(1, (1 << 20) // block_rows) * block_rows  # memory that opening needs besides the rows
        for start in range(owned.start, owned.stop, rows_at_once):
            stop = min(start + rows_at_once, owned.stop)
            read_records(group, description, start, stop, resident.words[start - owned.start : stop - owned.start])
    return resident
