"""The rows of one rank while a run trains: read and written by sample, cut into snapshots by block.

Sample ids count over all ranks; `rows` count from the rank's first id; `places` say where the row's record lies in
memory, which is for `Blocks` to know.
"""

import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .before_images import BeforeImages
from .commit import ColumnPart
from .records import FLAGS, IDS, Floats, Words, aligned_words, are_finite, compiled, gather, scatter, to_columns
from .sample_ids import Flags, IdArray
from .schema import Schema

_BLOCKS_WRITTEN_AT_ONCE = 16
"""Neighbouring blocks that a snapshot writes in one go: zarr's cost a call is spread over them."""


class Blocks(Protocol):
    """Where the blocks of a rank lie in memory."""

    words: Words
    """The records in memory, [any number of them, row_words]."""
    lock: threading.Condition
    """Held by whoever uses a place, so that its record stays there meanwhile."""

    def places(self, rows: IdArray, *, wait: bool) -> IdArray | None:
        """Return where the records of `rows` [b] are; where some are not in memory, fetch them, or return None."""

    def changed(self, rows: IdArray) -> None:
        """Note that the records of `rows` were written."""

    def in_memory(self) -> Flags:
        """Say of every block whether it is in memory, bool [blocks]."""

    def records(self, block: int) -> Words:
        """Return the records of a block that is in memory, [its rows, row_words]."""

    def fetched(self, block: int) -> Words:
        """Return a copy of the records of a block that is not in memory; called without the lock."""


class ResidentBlocks:
    """All blocks in memory, one after the other; at first every row has its initial values."""

    def __init__(self, schema: Schema, rows: int, block_rows: int) -> None:
        self.words = aligned_words(rows, schema.row_words)
        self.words[:] = schema.initial_record()
        self.lock = threading.Condition()
        self._block_rows = block_rows
        self._all = np.ones(-(-rows // block_rows), dtype=bool)

    def places(self, rows: IdArray, *, wait: bool) -> IdArray | None:
        return rows

    def changed(self, rows: IdArray) -> None:
        pass

    def in_memory(self) -> Flags:
        return self._all

    def records(self, block: int) -> Words:
        return self.words[block * self._block_rows : (block + 1) * self._block_rows]

    def fetched(self, block: int) -> Words:
        raise AssertionError("every block is in memory")


class Rows:
    """Reads and writes rows, and keeps what a snapshot needs: which blocks changed, and how they were at its cut.

    owned: the ids of this rank, in whole blocks. A snapshot is `cut`, then `parts` is read to its end, then
    `written` or `not_written` is called; the next cut comes after that. Any thread may call.
    """

    def __init__(self, schema: Schema, owned: range, block_rows: int, blocks: Blocks) -> None:
        self.schema, self.owned, self.block_rows = schema, owned, block_rows
        self._blocks = blocks
        count = -(-len(owned) // block_rows)
        self._dirty = np.zeros(count, dtype=bool)  # changed since the last cut
        self._pending = np.zeros(count, dtype=bool)  # in the cut that is being written, and not written yet
        self._cut = np.zeros(count, dtype=bool)  # in the cut that is being written
        self._before = BeforeImages(count, block_rows, schema.row_words)

    def gather(self, ids: IdArray, values: Floats, visits: npt.NDArray[np.int32], *, wait: bool = True) -> bool:
        """Read the rows of `ids` [b] into `values`, field-major [fields, b], and `visits` [b].

        Returns False, with nothing read, where a row is not in memory and was not to be waited for.
        """
        with self._blocks.lock:
            places = self._blocks.places(ids - self.owned.start, wait=wait)
            if places is None:
                return False
            gather(self._blocks.words, places, values, visits)
        return True

    def scatter(self, ids: IdArray, values: Floats, step: int) -> Flags:
        """Write `values` [fields, b] into the rows of `ids` [b], count the visit and note the step.

        A row with a value that is not finite is refused whole: its old row stays. Returns which were, bool [b].
        """
        rows = ids - self.owned.start
        accepted = are_finite(values)
        before = np.zeros(len(rows), dtype=bool)
        with self._blocks.lock:
            places = self._blocks.places(rows, wait=True)
            assert places is not None
            if _mark(rows, accepted, self.block_rows, self._dirty, self._pending, before):
                self._before.save(self._blocks.words, places, rows, before)
            scatter(self._blocks.words, places, values, accepted, np.uint32(step))
            self._blocks.changed(rows)
        return ~accepted

    def cut(self) -> None:
        """Let the next snapshot be the rows as they are now, and count every block as unchanged."""
        with self._blocks.lock:
            self._cut[:] = self._pending[:] = self._dirty
            self._dirty[:] = False

    def parts(self) -> Iterator[ColumnPart]:
        """Yield the blocks that had changed at the cut, as they were then; a part is overwritten by the next one."""
        names = self.schema.columns
        longest = min(_BLOCKS_WRITTEN_AT_ONCE * self.block_rows, len(self.owned))
        memory = np.empty((len(names), longest), dtype=np.uint32)
        while (run := self._next_run()) is not None:
            first, end = run
            start, stop = first * self.block_rows, min(end * self.block_rows, len(self.owned))
            # Whole parts are contiguous in every column; a short one is a slice of the same memory.
            columns = memory[:, : stop - start]
            for block in range(first, end):
                self._copy_as_cut(block, columns[:, (block - first) * self.block_rows :][:, : self.block_rows])
            yield ColumnPart(
                self.owned.start + start,
                {name: column.view(self.schema.dtype(name)) for name, column in zip(names, columns, strict=True)},
            )

    def written(self) -> None:
        """Let go of the cut: its snapshot is committed."""
        with self._blocks.lock:
            self._cut[:] = False
            self._before.clear()

    def not_written(self) -> None:
        """Count the blocks of the cut as changed again: its snapshot failed, and the next one has to write them."""
        with self._blocks.lock:
            self._dirty |= self._cut
            self._cut[:] = self._pending[:] = False
            self._before.clear()

    def _next_run(self) -> tuple[int, int] | None:
        """Choose up to 16 neighbouring pending blocks: first … end − 1."""
        with self._blocks.lock:
            if not self._pending.any():
                return None
            # Blocks in memory first: they are the ones being overwritten, and their before-images cost memory.
            at_hand = self._pending & self._blocks.in_memory()
            first = int(np.argmax(at_hand if at_hand.any() else self._pending))
            end = first + 1
            while end < len(self._pending) and self._pending[end] and end - first < _BLOCKS_WRITTEN_AT_ONCE:
                end += 1
            return first, end

    def _copy_as_cut(self, block: int, columns: Words) -> None:
        with self._blocks.lock:
            if self._blocks.in_memory()[block]:
                to_columns(self._blocks.records(block), columns)
                self._restore(block, columns)
                return
        # Whatever happens to the block meanwhile, every row that it brings is either as cut or has a before-image.
        to_columns(self._blocks.fetched(block), columns)
        with self._blocks.lock:
            self._restore(block, columns)

    def _restore(self, block: int, columns: Words) -> None:
        self._before.restore(block, columns)
        self._pending[block] = False


@compiled("int64", IDS, FLAGS, "int64", FLAGS, FLAGS, FLAGS)
def _mark(rows: IdArray, accepted: Flags, block_rows: int, dirty: Flags, pending: Flags, before: Flags) -> int:
    """Mark the blocks of accepted rows as dirty, and in `before` those rows whose block a snapshot still has to write.

    Returns how many of these there are.
    """
    count = 0
    for i in range(rows.shape[0]):
        if accepted[i]:
            block = rows[i] // block_rows
            dirty[block] = True
            if pending[block]:
                before[i] = True
                count += 1
    return count
