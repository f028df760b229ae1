"""Loading rows from a snapshot: all of a rank's rows, or as many blocks as the memory budget allows."""

import numpy as np

from .chunks import read_rows
from .durable import Repository
from .errors import MemoryBudgetError
from .history import Snapshot
from .rows import ResidentBlocks, Rows
from .schema import Description
from .windowed import WindowedBlocks
from .working_tier import WorkingTier

_ROWS_LOADED_AT_ONCE = 1 << 20
"""Limits the memory that opening a store needs besides its rows."""


def slots_within(memory_budget: int | None, description: Description, owned: range) -> int | None:
    """Return how many blocks a budget in bytes holds, or None if it is None or holds all rows of `owned`.

    Raises MemoryBudgetError for a budget below one block, ValueError for a range that is not in whole blocks.
    """
    _check_owned(owned, description)
    block_rows, row_bytes = description.block_rows, 4 * description.schema.row_words
    if memory_budget is None or len(owned) * row_bytes <= memory_budget:
        return None
    slots = memory_budget // (block_rows * row_bytes)
    if slots < 1:
        raise MemoryBudgetError(
            f"a memory budget of {memory_budget:,} bytes is less than a block of {block_rows:,} rows of {row_bytes} "
            f"bytes. Raise it to {block_rows * row_bytes:,} or more; the order's windows need several blocks"
        )
    return slots


def rows_at(
    repository: Repository, description: Description, snapshot: Snapshot, owned: range, slots: int | None, rank: int
) -> tuple[Rows, WindowedBlocks | None]:
    """Return a rank's rows as of `snapshot`, and its windowed blocks if only `slots` blocks are in memory.

    owned: ids of the rank. slots: number of blocks; None makes all rows resident.
    """
    schema, block_rows = description.schema, description.block_rows
    if slots is None:
        resident = ResidentBlocks(schema, len(owned), block_rows)
        if snapshot.step > 0:
            _read_all(resident, repository, description, snapshot, owned)
        return Rows(schema, owned, block_rows, resident), None
    tier = WorkingTier(repository, description, owned, snapshot, rank)
    windowed = WindowedBlocks(
        schema, len(owned), block_rows, slots, tier, first_block=owned.start // block_rows, step=snapshot.step
    )
    return Rows(schema, owned, block_rows, windowed), windowed


def _read_all(
    blocks: ResidentBlocks, repository: Repository, description: Description, snapshot: Snapshot, owned: range
) -> None:
    group = repository.group(snapshot)
    rows_at_once = max(1, _ROWS_LOADED_AT_ONCE // description.block_rows) * description.block_rows
    for start in range(owned.start, owned.stop, rows_at_once):
        stop = min(start + rows_at_once, owned.stop)
        records = blocks.words[start - owned.start : stop - owned.start]
        for place, column in enumerate(description.schema.columns):
            records[:, place] = read_rows(group, description, column, start, stop).view(np.uint32)


def _check_owned(owned: range, description: Description) -> None:
    block_rows, samples = description.block_rows, description.samples
    whole = owned.start % block_rows == 0 and (owned.stop % block_rows == 0 or owned.stop == samples)
    if not (whole and 0 <= owned.start < owned.stop <= samples and owned.step == 1):
        raise ValueError(
            f"the ids {owned.start} … {owned.stop - 1} are not whole blocks of {block_rows:,} rows of {samples:,} "
            "samples; give a rank the ids of its canonical shards"
        )
