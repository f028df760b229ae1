"""Compute the ranges of a shard's files that hold given samples, without touching a file or the store."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..row_records import MAX_BYTES, RECORD

PAGE = 4096
"""Allocation unit of a file system, in bytes."""
RECORDS_PER_PAGE = PAGE // RECORD.itemsize
"""A .rows file has a header as long as a record, so record r is the (r + 1)-th unit of this size."""
MAX_GAP = PAGE
"""Maximum gap in bytes between two samples that one request fetches together."""

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


def spans_of(records: NDArray[np.void], tokens_bytes: int) -> tuple[Ids, Ids, int]:
    """Return the starts and ends of RECORD [k]'s bytes in the .beton, int64 [k] both, and the first impossible record.

    tokens_bytes: of one caption. The third number is k if all records are possible: a sample's picture and tokens lie
    in one page of the .beton, so that a sample cannot make the cache fetch more.
    """
    jpeg_at, jpeg_end = (
        records["jpeg_at"].astype(np.int64),
        (records["jpeg_at"] + records["jpeg_bytes"]).astype(np.int64),
    )
    starts, stops = jpeg_at, jpeg_end
    if tokens_bytes:
        tokens_at = records["tokens_at"].astype(np.int64)
        tokens_end = tokens_at + records["captions"].astype(np.int64) * tokens_bytes
        starts, stops = np.minimum(jpeg_at, tokens_at), np.maximum(jpeg_end, tokens_end)
    too_long = stops - starts > MAX_BYTES
    return starts, stops, int(np.argmax(too_long)) if too_long.any() else len(records)


def requests(starts: Ids, stops: Ids, *, max_gap: int, max_bytes: int) -> list[Request]:
    """Return ranges that cover all of these spans, int64 [k] each; neighbours share ranges of at most `max_bytes`.

    Spans that are not ascending, which only a hostile file has, get a request each.
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


def pages_within(start: int, stop: int, before: int, after: int) -> tuple[int, int]:
    """Return the range of whole pages, in bytes, that only the span start … stop uses.

    before: end of the last sample before the span, or 0; after: start of the first sample after it, or a number above
    all. Pages shared with these samples are left out.
    """
    low, high = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
    if before > low:
        low = -(-before // PAGE) * PAGE
    if after < high:
        high = after // PAGE * PAGE
    return low, max(low, high)


def on_disk(starts: Ids, stops: Ids) -> int:
    """Return an upper bound on the bytes that spans take on disk, each by itself."""
    return int(((-(-stops // PAGE) - starts // PAGE) * PAGE).sum())
