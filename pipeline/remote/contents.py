"""What the cache has of a block of samples, or of a shard's records."""

from __future__ import annotations

import numpy as np

from .plan import Ids

ABSENT, COMING = -2, -1
_LAST = np.array([np.iinfo(np.int64).max])  # so that a search always ends at a key


class Contents:
    """Keys that are cached or being fetched, ids or numbers of pages, and where they are. Not thread-safe."""

    def __init__(self, number: int, file: int = 0) -> None:
        """number: the block's, or the shard's. file: number of the block's file, never used again."""
        self.number, self.file = number, file
        self._keys, self._at = _LAST, np.array([ABSENT])

    def find(self, keys: Ids) -> Ids:
        """Return the offset of each key, int64 [k]; ABSENT, or COMING while somebody fetches it."""
        places = np.searchsorted(self._keys, keys)
        return np.where(self._keys[places] == keys, self._at[places], ABSENT)

    def claim(self, keys: Ids) -> None:
        """Add absent keys, int64 [k], ascending, as COMING."""
        places = np.searchsorted(self._keys, keys)
        self._keys, self._at = np.insert(self._keys, places, keys), np.insert(self._at, places, COMING)

    def put(self, keys: Ids, at: Ids | int) -> None:
        """Record the offsets of claimed keys."""
        self._at[np.searchsorted(self._keys, keys)] = at

    def release(self, keys: Ids) -> None:
        """Remove those keys that are still COMING."""
        places = np.searchsorted(self._keys, keys)
        gone = places[self._at[places] == COMING]
        if len(gone):
            self._keys, self._at = np.delete(self._keys, gone), np.delete(self._at, gone)
