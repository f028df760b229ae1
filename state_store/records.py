"""Rows as aligned records in memory, and compiled loops over them, which release the GIL.

A record is `row_words` uint32 words: the float32 fields, visits, last_step, then padding. `places` are positions in an
array of records, not row numbers; see rows.py.
"""

import numpy as np

from ..storage.arrays import Bools, Float32s, Int32s, Int64s, Uint32s
from ..storage.kernels import kernel

RECORDS, IDS, FLAGS = "uint32[:,::1]", "int64[::1]", "bool_[::1]"
"""Types of a loop's arguments. It is compiled at import, since compiling at the first call would stall the training
thread; without fastmath, which would let the compiler assume that all values are finite."""

_CACHE_LINE_BYTES = 64
_TILE = 128
"""Number of records that fit the L1 cache together, so that memory is read once per record, not once per field."""


def aligned_words(rows: int, row_words: int) -> Uint32s:
    """Return words [rows, row_words] aligned to a cache line, so that no short row straddles two lines."""
    size = rows * row_words * 4
    memory = np.empty(size + _CACHE_LINE_BYTES, dtype=np.uint8)
    skip = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[skip : skip + size].view(np.uint32).reshape(rows, row_words)


@kernel(f"void({RECORDS}, {IDS}, float32[:,::1], int32[::1])")
def gather(words: Uint32s, places: Int64s, values: Float32s, visits: Int32s) -> None:
    """Read the records at `places` [b] into `values`, field-major [fields, b], and `visits` [b]."""
    fields = values.shape[0]
    floats = words.view(np.float32)
    for start in range(0, places.shape[0], _TILE):
        stop = min(start + _TILE, places.shape[0])
        # Visits first: so short a loop keeps many cache misses in flight, and each loads the rest of its record.
        # Places are unsigned because numba would otherwise check each for a negative index.
        for i in range(start, stop):
            visits[i] = words[np.uint64(places[i]), fields]
        for i in range(start, stop):
            record = floats[np.uint64(places[i])]
            for field in range(fields):
                values[field, i] = record[field]


@kernel(f"void({RECORDS}, {IDS}, float32[:,::1], {FLAGS}, uint32)")
def scatter(words: Uint32s, places: Int64s, values: Float32s, accepted: Bools, step: np.uint32) -> None:
    """Write `values` [fields, b] into the records at `places` [b] where `accepted`; update visits and last_step."""
    fields = values.shape[0]
    floats = words.view(np.float32)
    for start in range(0, places.shape[0], _TILE):
        stop = min(start + _TILE, places.shape[0])
        for i in range(start, stop):  # loads the records, as in `gather`
            if accepted[i]:
                counters = words[np.uint64(places[i]), fields:]
                counters[0] += np.uint32(1)
                counters[1] = step
        for i in range(start, stop):
            if accepted[i]:
                record = floats[np.uint64(places[i])]
                for field in range(fields):
                    record[field] = values[field, i]


@kernel(f"void({RECORDS}, uint32[:,:])")
def to_columns(words: Uint32s, columns: Uint32s) -> None:
    """Transpose the first words of the records [rows, row_words] into `columns`, [columns, rows]; faster than numpy."""
    for start in range(0, words.shape[0], _TILE):
        stop = min(start + _TILE, words.shape[0])
        for column in range(columns.shape[0]):
            for row in range(start, stop):
                columns[column, row] = words[row, column]
