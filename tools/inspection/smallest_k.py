"""Select the k smallest of very many samples in one pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MIN_PENDING = 1 << 16


class Smallest:
    """Keeps the `count` ids with the smallest keys; ties go to the lowest ids. Ids must be added in ascending order."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ids: list[NDArray[np.int64]] = []
        self._keys: list[NDArray[np.float64]] = []
        self._pending = 0
        self._limit = np.inf  # keys at or above this cannot be selected

    def add(self, ids: NDArray[np.int64], keys: NDArray[np.floating]) -> None:
        """Add ids, int64 [m], all higher than earlier ones, with their keys, [m]."""
        keep = keys < self._limit
        self._ids.append(ids[keep])
        self._keys.append(keys[keep].astype(np.float64))
        self._pending += int(keep.sum())
        if self._pending > max(_MIN_PENDING, self._count):
            self._compact()

    def chosen(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the ids, int64 [at most count], ordered by key, and the keys, float64."""
        self._compact()
        return self._ids[0], self._keys[0]

    def _compact(self) -> None:
        if not self._ids:
            self._ids, self._keys = [np.empty(0, np.int64)], [np.empty(0)]
        ids, keys = np.concatenate(self._ids), np.concatenate(self._keys)
        # Ids ascend among equal keys, so a stable sort keeps the lowest ids first.
        order = np.argsort(keys, kind="stable")[: self._count]
        self._ids, self._keys = [ids[order]], [keys[order]]
        self._pending = 0
        if len(order) == self._count and self._count:
            self._limit = float(self._keys[0][-1])
