"""Comparing all queries with a gallery, in pieces that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator

MAX_SIMILARITIES = 1 << 24
"""Maximum held at once: 64 MiB of float32, and a few times that for derived values."""


def chunks(queries: int, gallery: int) -> Iterator[slice]:
    """Yield slices of the queries, in order; each has at most MAX_SIMILARITIES pairs, but at least one query."""
    rows = max(1, MAX_SIMILARITIES // max(1, gallery))
    return (slice(first, min(first + rows, queries)) for first in range(0, queries, rows))
