"""A rank's rows during training: read and written by sample, saved in snapshots by block.

Sample ids count over all ranks, `rows` from the rank's first id. `places` are positions in memory, given by `Blocks`.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from ..storage.arrays import Bools, Float32s, Int32s, Int64s, Uint32s
from .commit import ColumnPart
from .history import Snapshot
from .records import aligned_words, gather, scatter, to_columns
from .schema import Schema

_BLOCKS_WRITTEN_AT_ONCE = 16
"""Maximum neighbouring blocks that a snapshot writes together, to amortise zarr's cost per call."""


class BlockWindow(Protocol):
    """Blocks used by a range of consecutive steps."""

    @property
    def first_step(self) -> int: ...
    @property
    def last_step(self) -> int: ...
    @property
    def blocks(self) -> Int64s: ...


class Blocks:
    """A rank's blocks and the places of their records in memory: here all blocks, in order, at their initial values.

    `WindowedBlocks` holds only some blocks. Block numbers start at the rank's first block.
    """

    blocks_read = blocks_written = 0
    """Blocks moved between memory and the disk."""

    def __init__(self, schema: Schema, rows: int, block_rows: int) -> None:
        self.words: Uint32s = aligned_words(rows, schema.row_words)
        self.words[:] = 0
        self.words.view(np.float32)[:, : len(schema.names)] = list(schema.initial.values())
        self.lock = threading.Condition()
        """Hold it while using a place: the record then stays there."""
        self._block_rows = block_rows
        self._present: Bools = np.ones(-(-rows // block_rows), dtype=bool)

    def places(self, rows: Int64s, *, wait: bool) -> Int64s | None:
        """Return the places of the records of `rows` [b]. If some are not in memory, fetch them, or return None."""
        return rows

    def changed(self, rows: Int64s) -> None:
        """Record that `rows` were written."""

    def in_memory(self) -> Bools:
        """Return which blocks are in memory, bool [blocks]."""
        return self._present

    def records(self, block: int) -> Uint32s:
        """Return the records of a block in memory, [rows of the block, row_words]."""
        return self.words[block * self._block_rows : (block + 1) * self._block_rows]

    def fetched(self, block: int) -> Uint32s:
        """Return a copy of the records of a block that is not in memory. Call it without the lock."""
        raise AssertionError("every block is in memory")

    def expect(self, windows: Iterable[BlockWindow]) -> None:
        """Follow these windows, ordered by first step; their blocks are numbered over all ranks."""

    def finished(self, step: int) -> None:
        """Record that the put of `step` is in the rows."""

    def follow(self, snapshot: Snapshot) -> None:
        """From now on, read blocks that were never changed from this snapshot."""

    def check(self) -> None:
        """Raise BackgroundError, with its cause, if a thread has failed."""

    def close(self) -> None:
        """End the threads. Changes that no snapshot contains are lost."""


class Rows:
    """Reads and writes rows, and tracks a snapshot's needs: the changed blocks, as they were at its cut.

    owned: ids of this rank, in whole blocks. step: of the snapshot that the rows come from. For a snapshot call `cut`,
    consume `parts` to its end, then call `written` or `not_written` before the next `cut`. Thread-safe.
    """

    def __init__(self, schema: Schema, owned: range, block_rows: int, blocks: Blocks, step: int) -> None:
        self.schema, self.owned, self.block_rows, self.blocks = schema, owned, block_rows, blocks
        count = -(-len(owned) // block_rows)
        self._dirty = np.zeros(count, dtype=bool)  # changed since the last cut
        self._pending = np.zeros(count, dtype=bool)  # in the cut being written, not written yet
        self._cut = np.zeros(count, dtype=bool)  # in the cut being written
        self._saved_at = np.full(count, step, dtype=np.int64)  # step of the newest snapshot in which the block changed
        # Old values of rows that were overwritten while a snapshot was being written. Rows, not blocks: a random batch
        # touches nearly every block, so copying blocks would copy the whole store.
        self._before: list[tuple[Int64s, Uint32s]] = []

    def gather(self, ids: Int64s, values: Float32s, visits: Int32s, *, wait: bool = True) -> bool:
        """Read the rows of `ids` [b] into `values`, field-major [fields, b], and `visits` [b].

        Returns False, and reads nothing, if a row is not in memory and `wait` is False.
        """
        with self.blocks.lock:
            places = self.blocks.places(ids - self.owned.start, wait=wait)
            if places is None:
                return False
            gather(self.blocks.words, places, values, visits)
        return True

    def scatter(self, ids: Int64s, values: Float32s, step: int) -> Bools:
        """Write `values` [fields, b] into the rows of `ids` [b], increment their visits and set their last step.

        Rejects a row with a non-finite value, and keeps the old row. Returns which rows were rejected, bool [b].
        """
        rows = ids - self.owned.start
        blocks = rows // self.block_rows
        accepted: Bools = np.asarray(np.isfinite(values).all(axis=0))
        with self.blocks.lock:
            places = self.blocks.places(rows, wait=True)
            assert places is not None
            self._dirty[blocks[accepted]] = True
            before = accepted & self._pending[blocks]  # rows of blocks that a snapshot has yet to write
            if before.any():
                self._before.append((rows[before], self.blocks.words[places[before]]))
            scatter(self.blocks.words, places, values, accepted, np.uint32(step))
            self.blocks.changed(rows)
        return ~accepted

    def cut(self) -> None:
        """Fix the content of the next snapshot as the current rows, and mark every block unchanged."""
        with self.blocks.lock:
            self._cut[:] = self._dirty
            self._pending[:] = True  # until `parts` knows which blocks are needed, keep the old rows of all
            self._dirty[:] = False

    def parts(self, since: int) -> Iterator[ColumnPart]:
        """Yield the blocks changed after the snapshot of step `since`, as of the cut.

        Each part reuses the memory of the previous part. Raises the errors of reading a block that is not in memory.
        """
        with self.blocks.lock:
            self._cut |= self._saved_at > since
            self._pending &= self._cut
        names = self.schema.columns
        longest = min(_BLOCKS_WRITTEN_AT_ONCE * self.block_rows, len(self.owned))
        memory = np.empty((len(names), longest), dtype=np.uint32)
        for first, end in iter(self._next_run, None):
            start, stop = first * self.block_rows, min(end * self.block_rows, len(self.owned))
            # Full parts are contiguous in every column; a shorter one is a slice of the same memory.
            columns = memory[:, : stop - start]
            for block in range(first, end):
                self._copy(block, columns[:, (block - first) * self.block_rows :][:, : self.block_rows])
            self._restore(start, columns)  # without the lock: nothing more is saved of blocks that were copied
            yield ColumnPart(
                self.owned.start + start,
                {name: column.view(self.schema.dtype(name)) for name, column in zip(names, columns, strict=True)},
            )

    def written(self, step: int) -> None:
        """Release the cut after its snapshot at this step was committed."""
        with self.blocks.lock:
            self._saved_at[self._cut] = step
            self._cut[:] = False
            self._before = []

    def not_written(self) -> None:
        """Mark the blocks of the cut as changed again after its snapshot failed: the next snapshot writes them."""
        with self.blocks.lock:
            self._dirty |= self._cut
            self._cut[:] = self._pending[:] = False
            self._before = []

    def _next_run(self) -> tuple[int, int] | None:
        """Choose up to 16 neighbouring pending blocks, first … end − 1."""
        with self.blocks.lock:
            if not self._pending.any():
                return None
            # Blocks in memory first: they are being overwritten, and their before-images cost memory.
            at_hand = self._pending & self.blocks.in_memory()
            first = int(np.argmax(at_hand if at_hand.any() else self._pending))
            end = first + 1
            while end < len(self._pending) and self._pending[end] and end - first < _BLOCKS_WRITTEN_AT_ONCE:
                end += 1
            return first, end

    def _copy(self, block: int, columns: Uint32s) -> None:
        """Copy the block as it is now. From then on, none of its rows is saved."""
        with self.blocks.lock:
            if self.blocks.in_memory()[block]:
                to_columns(self.blocks.records(block), columns)
                self._pending[block] = False
                return
        # Whatever happens meanwhile, each row fetched here is unchanged since the cut or has a before-image.
        to_columns(self.blocks.fetched(block), columns)
        with self.blocks.lock:
            self._pending[block] = False

    def _restore(self, first_row: int, columns: Uint32s) -> None:
        """Write the old values of the rows from `first_row` on back into their `columns` [columns, rows]."""
        # Newest to oldest: if a row was saved twice, its first save is the value at the cut.
        for rows, words in reversed([*self._before]):
            here = (rows >= first_row) & (rows < first_row + columns.shape[1])
            columns[:, rows[here] - first_row] = words[here, : len(columns)].T
