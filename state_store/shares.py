"""Create a store or open it at a snapshot: take the lock, agree among the ranks, load each rank's rows."""

from collections.abc import Callable
from contextlib import ExitStack

import torch

from ..storage.lock import LockedError
from ..storage.place import Lock, Place, leased, lock_at
from . import history
from .durable import Repository
from .errors import MemoryBudgetError, StoreLockedError
from .history import Snapshot
from .ranks import Ranks, agreement
from .reader import read_records
from .rows import Blocks, Rows
from .schema import Description
from .staging import Staging
from .windowed import WindowedBlocks
from .working_tier import WorkingTier, discard

_ROWS_LOADED_AT_ONCE = 1 << 20
"""Limits the memory that opening a store needs besides its rows."""


Share = tuple[Repository, Snapshot, Rows, Staging, Lock | None, Ranks]
"""A rank's part of an open store: history, first snapshot, rows, and on rank 0 the lock if it took one."""


def open_share(
    path: Place,
    describe: Callable[[], Description],
    begin: Callable[[Place, Description, str | None], Snapshot],
    device: str | torch.device,
    memory_budget: int | None,
    ranks: Ranks | None,
    owned: range | None,
    lock: Lock | None,
) -> Share:
    """Take the lock, unless given; create or find the first snapshot on rank 0; then load each rank's rows.

    If a rank fails, all do. `begin` creates or undoes the store, only once nothing else can fail. Its arguments are the
    path, in a bucket under the lock's lease, and the name of the lock's holding.
    """
    ranks = ranks or Ranks()
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
    return repository, snapshot, rows, staging, own, ranks


def writer_lock(path: Place) -> Lock:
    """Take the writer lock, `<repository>.lock`; readers need no lock. Raises StoreLockedError, OSError."""
    file = path.with_name(path.name + ".lock")
    try:
        return lock_at(file, lambda: history.taken_over(path), lambda: history.last_writer(path))
    except LockedError as error:
        raise StoreLockedError(
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
        raise MemoryBudgetError(
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
        rows_at_once = max(1, _ROWS_LOADED_AT_ONCE // block_rows) * block_rows
        for start in range(owned.start, owned.stop, rows_at_once):
            stop = min(start + rows_at_once, owned.stop)
            read_records(group, description, start, stop, resident.words[start - owned.start : stop - owned.start])
    return resident
