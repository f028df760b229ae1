"""A rank's rows during training: read and written by sample, saved in snapshots by block.

Sample ids count over all ranks. `rows` count from the rank's first id. `places` are positions of records in memory,
assigned only by `Blocks`.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..storage.kernels import kernel
from .commit import ColumnPart
from .history import Snapshot
from .records import FLAGS, IDS, RECORDS, Flags, Floats, IdArray, Words, aligned_words, gather, scatter, to_columns
from .schema import Schema

_BLOCKS_WRITTEN_AT_ONCE = 16
"""Maximum neighbouring blocks that a snapshot writes together, to amortise zarr's cost per call."""
_NONE = -1
"""The end of a chain."""


class BlockWindow(Protocol):
    """Blocks used by a range of consecutive steps."""

    @property
    def first_step(self) -> int: ...
    @property
    def last_step(self) -> int: ...
    @property
    def blocks(self) -> IdArray: ...


class Blocks:
    """A rank's blocks and the places of their records in memory: here all blocks, in order, at their initial values.

    `WindowedBlocks` holds only some blocks. Block numbers start at the rank's first block.
    """

    blocks_read = blocks_written = 0
    """Blocks moved between memory and the disk."""

    def __init__(self, schema: Schema, rows: int, block_rows: int) -> None:
        self.words: Words = aligned_words(rows, schema.row_words)
        self.words[:] = 0
        self.words.view(np.float32)[:, : len(schema.names)] = list(schema.initial.values())
        self.lock = threading.Condition()
        """Hold it while using a place: the record then stays there."""
        self._block_rows = block_rows
        self._present: Flags = np.ones(-(-rows // block_rows), dtype=bool)

    def places(self, rows: IdArray, *, wait: bool) -> IdArray | None:
        """Return the places of the records of `rows` [b]. If some are not in memory, fetch them, or return None."""
        return rows

    def changed(self, rows: IdArray) -> None:
        """Record that `rows` were written."""

    def in_memory(self) -> Flags:
        """Return which blocks are in memory, bool [blocks]."""
        return self._present

    def records(self, block: int) -> Words:
        """Return the records of a block in memory, [rows of the block, row_words]."""
        return self.words[block * self._block_rows : (block + 1) * self._block_rows]

    def fetched(self, block: int) -> Words:
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
        self._before = BeforeImages(count, block_rows, schema.row_words)

    def gather(self, ids: IdArray, values: Floats, visits: npt.NDArray[np.int32], *, wait: bool = True) -> bool:
        """Read the rows of `ids` [b] into `values`, field-major [fields, b], and `visits` [b].

        Returns False, and reads nothing, if a row is not in memory and `wait` is False.
        """
        with self.blocks.lock:
            places = self.blocks.places(ids - self.owned.start, wait=wait)
            if places is None:
                return False
            gather(self.blocks.words, places, values, visits)
        return True

    def scatter(self, ids: IdArray, values: Floats, step: int) -> Flags:
        """Write `values` [fields, b] into the rows of `ids` [b], increment their visits and set their last step.

        Rejects a row with a non-finite value, and keeps the old row. Returns which rows were rejected, bool [b].
        """
        rows = ids - self.owned.start
        blocks = rows // self.block_rows
        accepted: Flags = np.asarray(np.isfinite(values).all(axis=0))
        with self.blocks.lock:
            places = self.blocks.places(rows, wait=True)
            assert places is not None
            self._dirty[blocks[accepted]] = True
            before = accepted & self._pending[blocks]  # rows of blocks that a snapshot has yet to write
            if before.any():
                self._before.save(self.blocks.words, places, rows, before)
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
        while (run := self._next_run()) is not None:
            first, end = run
            start, stop = first * self.block_rows, min(end * self.block_rows, len(self.owned))
            # Full parts are contiguous in every column; a shorter one is a slice of the same memory.
            columns = memory[:, : stop - start]
            for block in range(first, end):
                self._copy_as_cut(block, columns[:, (block - first) * self.block_rows :][:, : self.block_rows])
            yield ColumnPart(
                self.owned.start + start,
                {name: column.view(self.schema.dtype(name)) for name, column in zip(names, columns, strict=True)},
            )

    def written(self, step: int) -> None:
        """Release the cut after its snapshot at this step was committed."""
        with self.blocks.lock:
            self._saved_at[self._cut] = step
            self._cut[:] = False
            self._before.clear()

    def not_written(self) -> None:
        """Mark the blocks of the cut as changed again after its snapshot failed: the next snapshot writes them."""
        with self.blocks.lock:
            self._dirty |= self._cut
            self._cut[:] = self._pending[:] = False
            self._before.clear()

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

    def _copy_as_cut(self, block: int, columns: Words) -> None:
        with self.blocks.lock:
            if self.blocks.in_memory()[block]:
                to_columns(self.blocks.records(block), columns)
                self._restore(block, columns)
                return
        # Whatever happens to the block meanwhile, each row fetched here is unchanged since the cut or has a
        # before-image.
        to_columns(self.blocks.fetched(block), columns)
        with self.blocks.lock:
            self._restore(block, columns)

    def _restore(self, block: int, columns: Words) -> None:
        self._before.restore(block, columns)
        self._pending[block] = False


class BeforeImages:
    """Old values of rows that were overwritten while a snapshot was being written.

    Rows, not blocks: a random batch touches nearly every block, so copying blocks would copy the whole store. Each
    block has one chain of records, newest first; its memory is reused once restored.
    """

    def __init__(self, blocks: int, block_rows: int, row_words: int) -> None:
        self._block_rows, self._row_words = block_rows, row_words
        self._newest = np.full(blocks, _NONE, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Discard everything and release the memory."""
        self._newest[:] = _NONE
        self._older = np.empty(0, dtype=np.int64)
        self._row = np.empty(0, dtype=np.int64)
        self._words: Words = np.empty((0, self._row_words), dtype=np.uint32)
        self._free = _NONE
        self._free_records = 0

    def save(self, words: Words, places: IdArray, rows: IdArray, wanted: Flags) -> None:
        """Save the records `words[places]` of `rows` [b], where `wanted`, before they are overwritten."""
        count = int(wanted.sum())
        if count > self._free_records:
            self._grow(count - self._free_records)
        self._free = _save(
            words, places, rows, wanted, self._block_rows, self._newest, self._older, self._row, self._words, self._free
        )
        self._free_records -= count

    def restore(self, block: int, columns: Words) -> None:
        """Write the saved records of `block` back into its `columns` [columns, rows], and discard them."""
        first_row = block * self._block_rows
        self._free, restored = _restore(
            columns, first_row, self._newest[block], self._older, self._row, self._words, self._free
        )
        self._newest[block] = _NONE
        self._free_records += restored

    def _grow(self, needed: int) -> None:
        size = len(self._row)
        added = max(needed, size // 2, 1024)
        self._older = np.concatenate([self._older, np.arange(size + 1, size + added + 1)])
        self._older[-1] = self._free
        self._row = np.concatenate([self._row, np.empty(added, dtype=np.int64)])
        self._words = np.concatenate([self._words, np.empty((added, self._row_words), dtype=np.uint32)])
        self._free = size
        self._free_records += added


@kernel(f"int64({RECORDS}, {IDS}, {IDS}, {FLAGS}, int64, {IDS}, {IDS}, {IDS}, {RECORDS}, int64)")
def _save(
    words: Words,
    places: IdArray,
    rows: IdArray,
    wanted: Flags,
    block_rows: int,
    newest: IdArray,
    older: IdArray,
    saved_row: IdArray,
    saved_words: Words,
    free: int,
) -> int:
    for i in range(rows.shape[0]):
        if wanted[i]:
            record, free = free, older[free]
            saved_row[record] = rows[i]
            for word in range(words.shape[1]):
                saved_words[record, word] = words[places[i], word]
            block = rows[i] // block_rows
            older[record] = newest[block]
            newest[block] = record
    return free


@kernel(f"UniTuple(int64, 2)(uint32[:,:], int64, int64, {IDS}, {IDS}, {RECORDS}, int64)")
def _restore(
    columns: Words, first_row: int, newest: int, older: IdArray, saved_row: IdArray, saved_words: Words, free: int
) -> tuple[int, int]:
    # Newest to oldest: if a row was saved twice, its first save is the value at the cut.
    record, restored = newest, 0
    while record >= 0:
        for column in range(columns.shape[0]):
            columns[column, saved_row[record] - first_row] = saved_words[record, column]
        next_older = older[record]
        older[record] = free
        free, record = record, next_older
        restored += 1
    return free, restored
