"""Read a snapshot's rows in pieces: whole blocks of the state, a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from ....state_store import StateReader

ROWS_AT_ONCE = 1 << 18

Rows = dict[str, NDArray[Any]]
"""Column of the state -> values [m]."""


def pieces(reader: StateReader) -> list[range]:
    """Return ranges of ids in whole blocks of the state, about 262,144 ids each."""
    step = max(1, ROWS_AT_ONCE // reader.block_rows) * reader.block_rows
    return [range(start, min(start + step, reader.samples)) for start in range(0, reader.samples, step)]


def read_blocks(reader: StateReader, columns: Sequence[str]) -> Iterator[tuple[range, Rows]]:
    """Read columns of a snapshot piece by piece. Raises DamagedChunkError, SnapshotNotFoundError."""
    for piece in pieces(reader):
        yield piece, reader.rows(piece.start, piece.stop, columns)
