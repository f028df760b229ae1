"""The nearest pictures and captions of a sample, and the negatives with the largest weights, by the run's features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...trainer.errors import ConfigError
from .features_file import FeaturesFile

PICTURES, CAPTIONS = "pictures", "captions"
_KINDS = (PICTURES, CAPTIONS)
"""What the sides of a features file hold."""
ANCHORS = {1: ("sample",), 2: ("image", "text")}
"""Number of sides of the features -> sides of the state of an objective that has one."""


class Ranking(NamedTuple):
    """Other samples, the most similar first; of ties, the lowest ids first."""

    sample_ids: NDArray[np.int64]
    """int64 [k]."""
    similarity: NDArray[np.float32]
    """float32 [k]: cosine similarity of the features."""
    weights: NDArray[np.float64] | None = None
    """float64 [k]: p*, the softmax over all negatives; None without a temperature."""


class Neighbours(NamedTuple):
    """What surrounds a sample."""

    nearest: dict[str, Ranking]
    """`pictures` nearest to its picture; for pairs also `captions` nearest to its caption."""
    negatives: dict[str, Ranking]
    """Side of the state -> negatives of that side: captions for the side `image`, pictures for `text`; for the side
    `sample` of a run on images, pictures."""
    pair_similarity: float | None
    """Cosine similarity of its picture and its caption; None without a caption."""


def find_neighbours(features: FeaturesFile, sample_id: int, count: int, tau: Mapping[str, float | None]) -> Neighbours:
    """Compare a sample with all others: exact, in one pass over the file and a few megabytes.

    count: samples per ranking; fewer if there are fewer others. tau: side of the state -> the sample's temperature;
    its negatives have no weights without one, or if it is not above 0.

    The weights are p*_ij = exp((s_ij - s_ii) / tau_i) / sum_k exp((s_ik - s_ii) / tau_i) over all other samples: the
    distribution over the negatives at which the robust loss takes its worst case (iSogCLR eq 6, Figure 3, appendix A).
    The similarity s_ii of the positive pair cancels, so a run on images needs no second view: one without augmentation
    stands for both views of each sample.
    Raises ConfigError for an unknown id, RunError for a damaged file.
    """
    if not 0 <= sample_id < features.samples:
        raise ConfigError(f"no such sample: {sample_id}; the run has {features.samples:,} samples, with ids 0 … "
                          f"{features.samples - 1}")  # fmt: skip
    (own,) = features.rows(np.array([sample_id]))
    kinds = range(features.sides)
    best = {(anchor, kind): _Best(count, None) for anchor in kinds for kind in kinds}
    for side in tau:
        anchor, kind = _places(side, features.sides)
        best[anchor, kind] = _Best(count, tau[side])
    for first, block in features.blocks():
        for (anchor, kind), found in best.items():
            # A product with a matrix of few columns takes longer than one for each column.
            similarity = block[:, kind] @ own[anchor]
            if first <= sample_id < first + len(block):
                similarity[sample_id - first] = -np.inf
            found.add(first, similarity)
    return Neighbours(
        nearest={_KINDS[kind]: best[kind, kind].ranking()._replace(weights=None) for kind in kinds},
        negatives={side: best[_places(side, features.sides)].ranking() for side in tau},
        pair_similarity=float(own[0] @ own[1]) if features.sides == 2 else None,
    )


def _places(side: str, sides: int) -> tuple[int, int]:
    """Return which side of the features holds the anchors of a side of the state, and which its negatives."""
    if sides == 1:
        return 0, 0
    return (1, 0) if side == "text" else (0, 1)


class _Best:
    """The most similar of the samples seen so far, and the sum of exp((similarity - highest) / tau) over all."""

    def __init__(self, count: int, tau: float | None) -> None:
        self._count = count
        self._tau = tau if tau is not None and 0 < tau < math.inf else None
        self._ids, self._similarity = np.empty(0, np.int64), np.empty(0, np.float32)
        self._highest, self._total = -math.inf, 0.0

    def add(self, first: int, similarity: NDArray[np.float32]) -> None:
        """similarity: float32 [m], of samples first … first + m - 1; -inf for the sample itself."""
        highest = float(similarity.max())
        if len(self._similarity) < self._count or highest > self._similarity[-1]:
            self._rank(first, similarity)
        if self._tau is not None and highest > -math.inf:
            self._sum(similarity, highest, self._tau)

    def _rank(self, first: int, similarity: NDArray[np.float32]) -> None:
        least = self._similarity[-1] if len(self._similarity) == self._count else -np.inf
        places = np.flatnonzero(similarity > least)
        ids = np.concatenate([self._ids, first + places])
        values = np.concatenate([self._similarity, similarity[places]])
        order = np.argsort(-values, kind="stable")[: self._count]  # ids ascend: of ties, the lowest stay
        self._ids, self._similarity = ids[order], values[order]

    def _sum(self, similarity: NDArray[np.float32], highest: float, tau: float) -> None:
        # Differences to the highest are exact in float32 where they matter; similarity / tau would not be.
        highest = max(self._highest, highest)
        sum_here = float(np.exp((similarity - np.float32(highest)) * np.float32(1 / tau)).sum())
        self._total = self._total * math.exp((self._highest - highest) / tau) + sum_here
        self._highest = highest

    def ranking(self) -> Ranking:
        shown = np.minimum(self._similarity, 1)  # float16 rounds some rows to a norm above 1
        if self._tau is None:
            return Ranking(self._ids, shown)
        exponents = (self._similarity.astype(np.float64) - self._highest) / self._tau
        return Ranking(self._ids, shown, np.exp(exponents) / self._total)
