"""A snapshot's rows a piece at a time: whole blocks of the state, as many as fit into a few megabytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from ..state_store import StateReader

ROWS_AT_ONCE = 1 << 18

Rows = dict[str, NDArray[Any]]
"""By column of the state, [m]."""


def pieces(reader: StateReader) -> list[range]:
    """The ids in whole blocks of the state, about 262,144 at a time."""
    step = max(1, ROWS_AT_ONCE // reader.block_rows) * reader.block_rows
    return [range(start, min(start + step, reader.samples)) for start in range(0, reader.samples, step)]


def read_blocks(reader: StateReader, columns: Sequence[str]) -> Iterator[tuple[range, Rows]]:
    """Read columns of a snapshot piece by piece. Raises DamagedChunkError, SnapshotNotFoundError."""
    for piece in pieces(reader):
        yield piece, reader.rows(piece.start, piece.stop, columns)
