"""Tracks which pages of each shard's records, and which of its samples, a cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition, RLock
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .plan import RECORDS_PER_PAGE, Ids

Kind = Literal["pages", "samples", "pictures"]
"""Pages of records; what samples have in the .beton; pictures that they have in tars."""
States = NDArray[np.uint8]

ABSENT, COMING, HERE, WHOLE = range(4)
"""WHOLE: here with all of its file, which is kept."""


class Places(NamedTuple):
    """Some pages of a shard's records, or parts of its samples, by number."""

    shard: int
    kind: Kind
    numbers: Ids
    """int64, ascending."""


class Presence:
    """States of pages and samples, one byte each, for the shards that are partly cached.

    The lock guards everything, and `changed` is notified of every change.
    """

    def __init__(self, lock: RLock, rows_of: Callable[[int], int]) -> None:
        self.changed = Condition(lock)
        self._rows_of = rows_of
        self._states: dict[tuple[int, Kind], States] = {}

    def of(self, shard: int, kind: Kind) -> States:
        """Return the states, uint8 [pages or rows], which the caller may change under the lock."""
        if (states := self._states.get((shard, kind))) is None:
            rows = self._rows_of(shard)
            count = rows // RECORDS_PER_PAGE + 1 if kind == "pages" else rows
            states = self._states[shard, kind] = np.zeros(count, np.uint8)
        return states

    def forget_if_empty(self, shard: int, kind: Kind) -> None:
        """Release the memory of states if nothing is cached."""
        if not self.of(shard, kind).any():
            del self._states[shard, kind]

    def are_here(self, wanted: Sequence[Places]) -> bool:
        """Return whether all of these are cached."""
        with self.changed:
            return all((self.of(shard, kind)[numbers] >= HERE).all() for shard, kind, numbers in wanted)

    def claim(self, wanted: Sequence[Places], check: Callable[[], None], *, wait: bool = True) -> list[Places]:
        """Return the places that the caller must fetch, now marked COMING; none once all are cached.

        Waits for other callers that fetch the rest, unless `wait` is false. check: called before each look; raises to
        end the wait.
        """
        with self.changed:
            while True:
                check()
                claimed, waits = [], False
                for shard, kind, numbers in wanted:
                    states = self.of(shard, kind)
                    found = states[numbers]
                    waits |= bool((found == COMING).any())
                    if len(absent := numbers[found == ABSENT]):
                        states[absent] = COMING
                        claimed.append(Places(shard, kind, absent))
                if claimed or not (waits and wait):
                    return claimed
                self.changed.wait()

    def arrived(self, places: Places) -> None:
        self._set(places, HERE)

    def failed(self, claimed: Sequence[Places]) -> None:
        """Release claimed places that have not arrived, for others to claim."""
        with self.changed:
            for shard, kind, numbers in claimed:
                states = self.of(shard, kind)
                states[numbers[states[numbers] == COMING]] = ABSENT
            self.changed.notify_all()

    def _set(self, places: Places, state: int) -> None:
        with self.changed:
            self.of(places.shard, places.kind)[places.numbers] = state
            self.changed.notify_all()
