"""Compute the requests that fetch ranges of files, without touching a file or the store."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...storage.arrays import Bools, Int64s
from ..dataset.row_records import RECORD

PAGE = 4096
"""Allocation unit of a file system, in bytes."""
RECORDS_PER_PAGE = PAGE // RECORD.itemsize
"""A .rows file has a header as long as a record, so record r is the (r + 1)-th unit of this size."""
MAX_GAP, MAX_TAR_GAP = PAGE, 64 << 10
"""Maximum gap in bytes between two samples that one request fetches together: in a .beton, and in a tar, which has its
other members between them."""


class Request(NamedTuple):
    """A range of a file, and the places, among the planned ones, that it covers."""

    start: int
    stop: int
    first: int
    last: int
    """Exclusive."""


def pages_of_rows(rows: Int64s) -> Int64s:
    """Return the pages of a .rows file with these records and the header, int64, ascending, without repeats."""
    return np.unique(np.append((rows + 1) // RECORDS_PER_PAGE, 0))


def requests(starts: Int64s, stops: Int64s, *, max_gap: int | Int64s, max_bytes: int) -> list[Request]:
    """Return ranges that cover all of these spans, int64 [k] each; neighbours share ranges of at most `max_bytes`.

    max_gap: in bytes, or int64 [k - 1]. Spans that are not ascending, which only a hostile file has, get one each.
    """
    if not len(starts):
        return []
    apart = (starts[1:] < stops[:-1]) | (starts[1:] - stops[:-1] > max_gap)
    found = []
    for first, last in runs(apart, len(starts)):
        while first < last:
            fits = int(np.searchsorted(stops[first:last], starts[first] + max_bytes, side="right"))
            end = min(first + max(1, fits), last)
            found.append(Request(int(starts[first]), int(stops[end - 1]), first, end))
            first = end
    return found


def runs(apart: Bools, count: int) -> list[tuple[int, int]]:
    """Return first place and end of each run among `count` places; apart: whether the next begins one, [count - 1]."""
    return list(pairwise([0, *(np.flatnonzero(apart) + 1).tolist(), count]))


def grouped(numbers: Int64s) -> Iterator[tuple[int, Int64s]]:
    """Yield each number, int64 [b], ascending, with its places among them."""
    order = np.argsort(numbers, kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(numbers) else ():
        yield int(numbers[places[0]]), places


def in_pages(size: int) -> int:
    """Return the bytes that a file takes on disk."""
    return -(-size // PAGE) * PAGE
