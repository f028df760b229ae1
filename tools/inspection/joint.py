"""Joint 2-D histogram and rank correlation of two values per sample, computed block by block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .distribution import Distribution

JOINT_BINS = 60


class Joint(NamedTuple):
    """Two temperatures per sample: of both sides, or at two snapshots."""

    counts: NDArray[np.int64]
    """int64 [bins, bins]: rows are bins of the first value, ascending."""
    edges: tuple[NDArray[np.float64], NDArray[np.float64]]
    """Bin edges of the first and of the second value, float64 [bins + 1]."""
    spearman: float | None
    """Rank correlation over the samples; None if either value is constant."""


class JointCounts:
    """Counts pairs of temperatures and sums up their ranks."""

    def __init__(self, first: Distribution, second: Distribution) -> None:
        self._sides = (first, second)
        self._edges = (first.edges(JOINT_BINS), second.edges(JOINT_BINS))
        self._counts = np.zeros([len(edges) - 1 for edges in self._edges], np.int64)
        self._ranks = RankCorrelation(first, second)

    def add(self, first: NDArray[np.float32], second: NDArray[np.float32]) -> None:
        places = []
        for values, edges in zip((first, second), self._edges, strict=True):
            share = (values.astype(np.float64) - edges[0]) / (edges[-1] - edges[0])
            places.append(np.clip(share * (len(edges) - 1), 0, len(edges) - 2).astype(np.int64))
        flat = np.ravel_multi_index((places[0], places[1]), self._counts.shape)
        self._counts += np.bincount(flat, minlength=self._counts.size).reshape(self._counts.shape)
        self._ranks.add(first, second)

    def result(self) -> Joint:
        return Joint(self._counts, self._edges, self._ranks.result())


class RankCorrelation:
    """Spearman's correlation of pairs of values given block by block; their distributions must be known."""

    def __init__(self, first: Distribution, second: Distribution) -> None:
        self._distributions = (first, second)
        self._sums = np.zeros(3)  # products of the centred ranks: 1 × 1, 2 × 2, 1 × 2

    def add(self, first: NDArray[np.float32], second: NDArray[np.float32]) -> None:
        """Count pairs, float32 [m] each."""
        ranks = [
            distribution.ranks(values) - 0.5
            for distribution, values in zip(self._distributions, (first, second), strict=True)
        ]
        self._sums += [ranks[0] @ ranks[0], ranks[1] @ ranks[1], ranks[0] @ ranks[1]]

    def result(self) -> float | None:
        """Return None if either value is constant."""
        first, second, both = self._sums.tolist()
        return both / (first * second) ** 0.5 if first and second else None
