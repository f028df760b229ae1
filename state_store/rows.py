"""Every sample's row of state in RAM: aligned records, gathered and scattered by compiled loops that free the GIL."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit

from .sample_ids import Flags, IdArray
from .schema import COUNTERS, Schema

Floats: TypeAlias = npt.NDArray[np.float32]
Words: TypeAlias = npt.NDArray[np.uint32]

_CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class RowRange:
    """A copy of the rows start … stop − 1, words [stop − start, row_words]; whole blocks, but for the store's end."""

    schema: Schema
    start: int
    stop: int
    words: Words

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column, contiguous: [stop − start], float32 for a field, uint32 for visits and last_step."""
        column = self.words[:, self.schema.columns.index(name)]
        return np.ascontiguousarray(column).view(self.schema.dtype(name))


class ResidentRows:
    """The rows of all samples, uint32 words [samples, row_words]: float32 fields, then visits and last_step.

    Not thread-safe by itself: one thread writes; others may read rows that are not being written.
    """

    def __init__(self, schema: Schema, samples: int, block_rows: int) -> None:
        self.schema = schema
        self.samples = samples
        self.block_rows = block_rows
        self._words = _aligned_words(samples, schema.row_words)
        self._floats = self._words.view(np.float32)
        self._dirty = np.zeros(-(-samples // block_rows), dtype=bool)
        self._words[:] = 0
        self._floats[:, : len(schema.names)] = np.array(list(schema.initial.values()), dtype=np.float32)

    def gather(self, ids: IdArray, values: Floats, visits: npt.NDArray[np.int32]) -> None:
        """Read the rows of `ids` [b] into `values`, field-major [fields, b], and `visits` [b]."""
        _gather(self._floats, self._words, ids, values, visits)

    def scatter(self, ids: IdArray, values: Floats, step: int) -> Flags:
        """Write `values` [fields, b] into the rows of `ids` [b], count the visit and note the step.

        A row with a value that is not finite is refused whole: its old row stays. Returns which were, bool [b].
        """
        refused = np.zeros(len(ids), dtype=bool)
        _scatter(self._floats, self._words, ids, values, np.uint32(step), self._dirty, self.block_rows, refused)
        return refused

    def cut(self) -> list[RowRange]:
        """Copy every block changed since the last cut, neighbours in one piece, and count them as unchanged."""
        edges = np.flatnonzero(np.diff(self._dirty, prepend=False, append=False)).tolist()
        self._dirty[:] = False
        return [self._copy(first, end) for first, end in zip(edges[::2], edges[1::2], strict=True)]

    def load(self, start: int, columns: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Set the rows from `start` on to the columns of a snapshot, each [rows]; they count as unchanged."""
        for place, name in enumerate(self.schema.columns):
            column = columns[name]
            words = self._words if name in COUNTERS else self._floats
            words[start : start + len(column), place] = column

    def _copy(self, first_block: int, end_block: int) -> RowRange:
        start, stop = first_block * self.block_rows, min(end_block * self.block_rows, self.samples)
        return RowRange(self.schema, start, stop, self._words[start:stop].copy())


def _aligned_words(rows: int, row_words: int) -> Words:
    """Return words [rows, row_words] beginning at a cache line, so that no short row crosses from one into the next."""
    size = rows * row_words * 4
    memory = np.empty(size + _CACHE_LINE_BYTES, dtype=np.uint8)
    skip = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[skip : skip + size].view(np.uint32).reshape(rows, row_words)


# No fastmath: it would let the compiler assume that no value is infinite or NaN, and drop the test for it.
@njit(cache=True, nogil=True)
def _gather(floats: Floats, words: Words, ids: IdArray, values: Floats, visits: npt.NDArray[np.int32]) -> None:
    fields = values.shape[0]
    for i in range(ids.shape[0]):
        row = ids[i]
        for field in range(fields):
            values[field, i] = floats[row, field]
        visits[i] = words[row, fields]


@njit(cache=True, nogil=True)
def _scatter(
    floats: Floats, words: Words, ids: IdArray, values: Floats, step: np.uint32, dirty: Flags, block_rows: int,
    refused: Flags,
) -> None:  # fmt: skip
    fields = values.shape[0]
    for i in range(ids.shape[0]):
        for field in range(fields):
            refused[i] |= not np.isfinite(values[field, i])
        if refused[i]:
            continue
        row = ids[i]
        for field in range(fields):
            floats[row, field] = values[field, i]
        words[row, fields] += np.uint32(1)
        words[row, fields + 1] = step
        dirty[row // block_rows] = True
