"""Rows as aligned records in memory, and the compiled loops over them; none holds the interpreter's lock.

A record is `row_words` uint32 words: the float32 fields, then visits and last_step, then padding. `places` are where
rows lie in an array of records, which is not what they are called: see rows.py.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from .sample_ids import Flags, IdArray

Floats: TypeAlias = npt.NDArray[np.float32]
Words: TypeAlias = npt.NDArray[np.uint32]

F = TypeVar("F", bound=Callable[..., object])

RECORDS, IDS, FLAGS = "uint32[:,::1]", "int64[::1]", "bool_[::1]"
"""Types of compiled arguments."""

_CACHE_LINE_BYTES = 64
_TILE = 128
"""Records that stay in the first-level cache together: each is fetched from memory once, not once a field."""


def aligned_words(rows: int, row_words: int) -> Words:
    """Return words [rows, row_words] beginning at a cache line, so that no short row crosses from one into the next."""
    size = rows * row_words * 4
    memory = np.empty(size + _CACHE_LINE_BYTES, dtype=np.uint8)
    skip = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[skip : skip + size].view(np.uint32).reshape(rows, row_words)


def compiled(result: str, *arguments: str) -> Callable[[F], F]:
    """Compile a loop for these types at import: at its first call, the compiler would stop the training thread."""

    def compile_now(function: F) -> F:
        # No fastmath: it would let the compiler assume that no value is infinite or NaN, and drop the test for it.
        return cast(F, njit(f"{result}({', '.join(arguments)})", cache=True, nogil=True)(function))

    return compile_now


@compiled("void", RECORDS, IDS, "float32[:,::1]", "int32[::1]")
def gather(words: Words, places: IdArray, values: Floats, visits: npt.NDArray[np.int32]) -> None:
    """Read the records at `places` [b] into `values`, field-major [fields, b], and `visits` [b]."""
    fields = values.shape[0]
    floats = words.view(np.float32)
    for start in range(0, places.shape[0], _TILE):
        stop = min(start + _TILE, places.shape[0])
        # The visits of the tile first: a loop so short has many cache misses under way at once, and each brings the
        # rest of its record along. Places are unsigned to numba, or it would look for negative ones each time.
        for i in range(start, stop):
            visits[i] = words[np.uint64(places[i]), fields]
        for i in range(start, stop):
            record = floats[np.uint64(places[i])]
            for field in range(fields):
                values[field, i] = record[field]


@compiled(FLAGS, "float32[:,::1]")
def are_finite(values: Floats) -> Flags:
    """Say of each row of `values` [fields, b] whether all its values are finite; bool [b]."""
    finite = np.ones(values.shape[1], dtype=np.bool_)
    for field in range(values.shape[0]):
        for i in range(values.shape[1]):
            finite[i] &= np.isfinite(values[field, i])
    return finite


@compiled("void", RECORDS, IDS, "float32[:,::1]", FLAGS, "uint32")
def scatter(words: Words, places: IdArray, values: Floats, accepted: Flags, step: np.uint32) -> None:
    """Write `values` [fields, b] into the records at `places` [b] where `accepted`, count the visit, note the step."""
    fields = values.shape[0]
    floats = words.view(np.float32)
    for start in range(0, places.shape[0], _TILE):
        stop = min(start + _TILE, places.shape[0])
        for i in range(start, stop):  # brings the records, as in `gather`
            if accepted[i]:
                counters = words[np.uint64(places[i]), fields:]
                counters[0] += np.uint32(1)
                counters[1] = step
        for i in range(start, stop):
            if accepted[i]:
                record = floats[np.uint64(places[i])]
                for field in range(fields):
                    record[field] = values[field, i]


@compiled("void", RECORDS, "uint32[:,:]")
def to_columns(words: Words, columns: Words) -> None:
    """Transpose the first words of the records [rows, row_words] into `columns` [columns, rows]."""
    for start in range(0, words.shape[0], _TILE):
        stop = min(start + _TILE, words.shape[0])
        for column in range(columns.shape[0]):
            for row in range(start, stop):
                columns[column, row] = words[row, column]
