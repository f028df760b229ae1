"""Pending prefetches and puts, from which `take` knows that no row it returns is stale."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from .records import IDS, compiled
from .sample_ids import Flags, IdArray, found_in
from .staging import StagedRows

_PREFETCHES_KEPT = 16
"""A prefetch whose take has not come after this many later prefetches or puts is dropped: it may never come."""


@dataclass(frozen=True)
class Prefetch:
    ids: IdArray
    ascending_ids: IdArray
    puts_seen: int
    """Number of the last put before it; the prefetch includes that put and all earlier ones."""
    staged: "Future[StagedRows | None]"
    """None if a row was not in memory."""


@dataclass(frozen=True)
class Put:
    number: int
    ascending_ids: IdArray
    done: "Future[None]"
    made_at: float
    """Monotonic clock, in seconds."""


class InFlight:
    """Pending prefetches, and the puts they may have missed, in call order."""

    def __init__(self) -> None:
        self._puts_made = 0
        self._puts: deque[Put] = deque()
        self._prefetches: deque[Prefetch] = deque(maxlen=_PREFETCHES_KEPT)

    def add_prefetch(self, ids: IdArray, staged: "Future[StagedRows | None]") -> None:
        self._prefetches.append(Prefetch(ids, np.sort(ids), self._puts_made, staged))

    def add_put(self, ascending_ids: IdArray, done: "Future[None]") -> None:
        self._puts_made += 1
        self._puts.append(Put(self._puts_made, ascending_ids, done, time.monotonic()))
        self._forget_old_puts()

    def claim(self, ids: IdArray) -> Prefetch | None:
        """Return the oldest prefetch of exactly these ids, and drop it and all older ones: batches come in order."""
        for place, prefetch in enumerate(self._prefetches):
            if len(prefetch.ids) == len(ids) and (prefetch.ids == ids).all():
                for _ in range(place + 1):
                    self._prefetches.popleft()
                return prefetch
        return None

    def puts_under_way(self, ids: IdArray) -> Iterator[Put]:
        """Yield the unfinished puts that share ids with `ids`."""
        under_way = [put for put in self._puts if not put.done.done()]
        ascending = np.sort(ids) if under_way else ids
        return (put for put in under_way if _meet(ascending, put.ascending_ids))

    def seconds_behind(self) -> float:
        """Age of the oldest unfinished put, in seconds; 0 if there is none."""
        made_at = next((put.made_at for put in self._puts if not put.done.done()), None)
        return 0.0 if made_at is None else time.monotonic() - made_at

    def puts_after(self, prefetch: Prefetch) -> Iterator[tuple[Put, Flags]]:
        """Yield the puts made after `prefetch` that share ids with it, and which of its ids those are, bool [b]."""
        for put in self._puts:
            if put.number > prefetch.puts_seen and _meet(prefetch.ascending_ids, put.ascending_ids):
                yield put, found_in(prefetch.ids, put.ascending_ids)

    def _forget_old_puts(self) -> None:
        """Drop puts that are in the rows and in every prefetched batch; no take needs them any more."""
        while self._prefetches and self._puts_made - self._prefetches[0].puts_seen > _PREFETCHES_KEPT:
            self._prefetches.popleft()
        seen_by_all = self._prefetches[0].puts_seen if self._prefetches else self._puts_made
        while self._puts and self._puts[0].number <= seen_by_all and self._puts[0].done.done():
            self._puts.popleft()


@compiled("bool_", IDS, IDS)
def _meet(ascending: IdArray, other: IdArray) -> bool:
    """Return whether two ascending vectors share an id. Most batches share none, so this is a take's usual cost."""
    i, j = 0, 0
    while i < ascending.shape[0] and j < other.shape[0]:
        left, right = ascending[i], other[j]
        if left == right:
            return True
        i += left < right  # branch-free: the branch would be unpredictable
        j += right < left
    return False
