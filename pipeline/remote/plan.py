"""Compute the ranges of a shard's files that hold given samples, without touching a file or the store."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dataset.row_records import PAGE_BYTES, RECORD

PAGE = 4096
"""Allocation unit of a file system, in bytes."""
RECORDS_PER_PAGE = PAGE // RECORD.itemsize
"""A .rows file has a header as long as a record, so record r is the (r + 1)-th unit of this size."""
MAX_GAP, MAX_TAR_GAP = PAGE, 64 << 10
"""Maximum gap in bytes between two samples that one request fetches together: in a .beton, and in a tar, which has its
other members between them."""

Ids = NDArray[np.int64]


class Request(NamedTuple):
    """A range of a file, and the places, among the planned ones, that it covers."""

    start: int
    stop: int
    first: int
    last: int
    """Exclusive."""


def pages_of_rows(rows: Ids) -> Ids:
    """Return the pages of a .rows file with these records and the header, int64, ascending, without repeats."""
    return np.unique(np.append((rows + 1) // RECORDS_PER_PAGE, 0))


def spans_of(records: NDArray[np.void], tars: Ids, tokens_bytes: int) -> tuple[Ids, Ids, int]:
    """Return the starts and ends of RECORD [k]'s bytes in the .beton, int64 [k] both, and the first impossible record.

    tars: -1 if the picture is in the .beton. tokens_bytes: of one caption. The third number is k if all records are
    possible: a sample's picture and tokens lie in one page of the .beton, so that a sample cannot make the cache fetch
    more. A sample with nothing there ends where it starts.
    """
    tokens_at = records["tokens_at"].astype(np.int64)
    tokens_end = tokens_at + records["captions"].astype(np.int64) * tokens_bytes
    jpeg_at = records["jpeg_at"].astype(np.int64)
    jpeg_end = jpeg_at + records["jpeg_bytes"]
    starts, stops = np.where(tars < 0, jpeg_at, tokens_at), np.where(tars < 0, jpeg_end, tokens_end)
    if tokens_bytes:
        starts, stops = np.minimum(starts, tokens_at), np.maximum(stops, tokens_end)
    too_long = stops - starts > PAGE_BYTES
    return starts, stops, int(np.argmax(too_long)) if too_long.any() else len(records)


def requests(starts: Ids, stops: Ids, *, max_gap: int | Ids, max_bytes: int) -> list[Request]:
    """Return ranges that cover all of these spans, int64 [k] each; neighbours share ranges of at most `max_bytes`.

    max_gap: in bytes, or int64 [k - 1]. Spans that are not ascending, which only a hostile file has, get one each.
    """
    if not len(starts):
        return []
    apart = (starts[1:] < stops[:-1]) | (starts[1:] - stops[:-1] > max_gap)
    found = []
    for first, last in _runs(apart, len(starts)):
        while first < last:
            fits = int(np.searchsorted(stops[first:last], starts[first] + max_bytes, side="right"))
            end = min(first + max(1, fits), last)
            found.append(Request(int(starts[first]), int(stops[end - 1]), first, end))
            first = end
    return found


def _runs(apart: NDArray[np.bool_], count: int) -> list[tuple[int, int]]:
    cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), count]
    return list(pairwise(cuts))


def pages_of(starts: Ids, stops: Ids) -> Ids:
    """Return the pages that spans use, int64 [any], those of several spans repeatedly."""
    first = starts // PAGE
    counts = np.where(stops > starts, -(-stops // PAGE) - first, 0)
    return np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def on_disk(starts: Ids, stops: Ids) -> int:
    """Return the bytes that spans take on disk."""
    return PAGE * len(np.unique(pages_of(starts, stops)))
