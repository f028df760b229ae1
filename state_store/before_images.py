"""Old values of rows that were overwritten while a snapshot was being written.

Rows, not blocks: a random batch touches nearly every block, so copying blocks would copy the whole store.
"""

import numpy as np

from .records import FLAGS, IDS, RECORDS, Words, compiled
from .sample_ids import Flags, IdArray

_NONE = -1


class BeforeImages:
    """Saved records in one chain per block, newest first; a chain's memory is reused once it is restored."""

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
            words, places, rows, wanted, self._block_rows,
            self._newest, self._older, self._row, self._words, self._free,
        )  # fmt: skip
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


@compiled("int64", RECORDS, IDS, IDS, FLAGS, "int64", IDS, IDS, IDS, RECORDS, "int64")
def _save(
    words: Words, places: IdArray, rows: IdArray, wanted: Flags, block_rows: int,
    newest: IdArray, older: IdArray, saved_row: IdArray, saved_words: Words, free: int,
) -> int:  # fmt: skip
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


@compiled("UniTuple(int64, 2)", "uint32[:,:]", "int64", "int64", IDS, IDS, RECORDS, "int64")
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
