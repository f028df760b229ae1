"""The neighbours of samples by the run's features: nearest pictures and captions, hardest negatives, margins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from ....pipeline.cores import cores
from ....trainer.errors import ConfigError
from .. import OnDone
from ..json_fields import TO_LIST, AsJson, named
from .confirmation import MAX_NEGATIVES
from .features_file import FeaturesFile

PICTURES, CAPTIONS = "pictures", "captions"
_KINDS = (PICTURES, CAPTIONS)
"""Contents of a features file, by side."""
ANCHORS = {1: ("sample",), 2: ("image", "text")}
"""Number of sides of the features -> sides of the state of an objective that has one."""

_LEAST_TAU = 1e-9
"""At lower ones, exponents leave the range of float32; no run has any."""
_SAMPLES_PER_THREAD = 100_000
_MARGIN_SEED = 2026

_Places = tuple[int, int]
"""Side of the features of the anchor, and of the samples that it is compared with."""


@dataclass(frozen=True)
class Ranking:
    """Other samples, the most similar first; of ties, the lowest ids first."""

    sample_ids: Annotated[NDArray[np.int64], TO_LIST]
    """int64 [k]."""
    similarity: Annotated[NDArray[np.float32], TO_LIST]
    """float32 [k]: cosine similarity of the features."""
    weights: Annotated[NDArray[np.float64] | None, AsJson(lambda p: p if p is None else p.tolist()), named("p")] = None
    """float64 [k]: p*, the softmax over all negatives; None without a temperature."""


@dataclass(frozen=True)
class Neighbours:
    """Neighbours and hardest negatives of a sample."""

    nearest: dict[str, Ranking]
    """`pictures` nearest to its picture; for pairs also `captions` nearest to its caption."""
    negatives: dict[str, Ranking]
    """Side of the state -> negatives of that side: captions for the side `image`, pictures for `text`; for the side
    `sample` of a run on images, pictures."""
    pair_similarity: float | None
    """Cosine similarity of its picture and its caption; None without a caption."""


def find_neighbours(features: FeaturesFile, sample_id: int, count: int, tau: Mapping[str, float | None]) -> Neighbours:
    """Compare a sample with all others: exact, in one pass over the file by a thread per core, in little memory.

    count: samples per ranking; fewer if there are fewer others. tau: side of the state -> the sample's temperature;
    its negatives have no weights without one, or if it is not positive.

    The weights are p*_ij = exp((s_ij - s_ii) / tau_i) / sum_k exp((s_ik - s_ii) / tau_i) over all other samples: the
    distribution over the negatives at which the robust loss takes its worst case (iSogCLR eq 6, Figure 3, appendix A).
    The similarity s_ii of the positive pair cancels, so a run on images needs no second view: one without augmentation
    stands for both views of each sample.
    Raises ConfigError for an unknown id, RunError for a damaged file.
    """
    if not 0 <= sample_id < features.samples:
        raise ConfigError(
            f"no such sample: {sample_id}; the run has {features.samples:,} samples, with ids 0 … "
            f"{features.samples - 1}"
        )
    (own,) = features.rows(np.array([sample_id]))
    wanted: dict[_Places, float | None] = {(one, other): None for one in range(len(own)) for other in range(len(own))}
    wanted |= {_places(side, len(own)): value for side, value in tau.items()}

    def scan(part: range) -> dict[_Places, _Best]:
        return _scan(features, part, sample_id, own, {places: _Best(count, wanted[places]) for places in wanted})

    parts = min(cores(), 1 + features.samples // _SAMPLES_PER_THREAD)
    edges = [features.samples * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(parts) as threads:
        best, *others = threads.map(scan, map(range, edges[:-1], edges[1:]))
    for other in others:
        for places, found in best.items():
            found.join(other[places])
    return Neighbours(
        nearest={_KINDS[kind]: replace(best[kind, kind].ranking(), weights=None) for kind in range(len(own))},
        negatives={side: best[_places(side, len(own))].ranking() for side in tau},
        pair_similarity=float(own[0] @ own[1]) if len(own) == 2 else None,
    )


def _scan(
    features: FeaturesFile, part: range, sample_id: int, own: NDArray[np.float32], best: dict[_Places, _Best]
) -> dict[_Places, _Best]:
    """Compare a sample, its features float32 [sides, d], with those of a range of ids."""
    for first, block in features.blocks(part.start, part.stop):
        for (anchor, kind), found in best.items():
            # A product with a matrix of few columns takes longer than one for each column.
            similarity = block[:, kind] @ own[anchor]
            if first <= sample_id < first + len(block):
                similarity[sample_id - first] = -np.inf
            found.add(first, similarity)
    return best


def _places(side: str, sides: int) -> _Places:
    """Return which side of the features holds the anchors of a side of the state, and which its negatives."""
    if sides == 1:
        return 0, 0
    return (1, 0) if side == "text" else (0, 1)


class _Best:
    """The most similar of the samples seen so far, and the sum of exp((similarity - highest) / tau) over all."""

    def __init__(self, count: int, tau: float | None) -> None:
        self._count = count
        self._tau = tau if tau is not None and _LEAST_TAU < tau < math.inf else None
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
        self._keep(first + places, similarity[places])

    def _keep(self, ids: NDArray[np.int64], similarity: NDArray[np.float32]) -> None:
        ids, similarity = np.concatenate([self._ids, ids]), np.concatenate([self._similarity, similarity])
        order = np.argsort(-similarity, kind="stable")[: self._count]  # ids ascend: of ties, the lowest stay
        self._ids, self._similarity = ids[order], similarity[order]

    def _sum(self, similarity: NDArray[np.float32], highest: float, tau: float) -> None:
        highest = max(self._highest, highest)
        # Differences to the highest are exact in float32 where they matter; similarity / tau would not be.
        sum_here = float(np.exp((similarity - np.float32(highest)) * np.float32(1 / tau)).sum())
        self._add(highest, sum_here, tau)

    def _add(self, highest: float, total: float, tau: float) -> None:
        """Add a sum relative to `highest`, which is no lower than the one before."""
        self._total = self._total * math.exp((self._highest - highest) / tau) + total
        self._highest = highest

    def join(self, later: _Best) -> None:
        """Add samples with higher ids."""
        self._keep(later._ids, later._similarity)
        if self._tau is not None and later._total:
            highest = max(self._highest, later._highest)
            self._add(highest, later._total * math.exp((later._highest - highest) / self._tau), self._tau)

    def ranking(self) -> Ranking:
        shown = np.minimum(self._similarity, 1)  # float16 rounds some rows to a norm above 1
        if self._tau is None:
            return Ranking(self._ids, shown)
        exponents = (self._similarity.astype(np.float64) - self._highest) / self._tau
        return Ranking(self._ids, shown, np.exp(exponents) / self._total)


def margins(features: FeaturesFile, on_progress: OnDone = lambda done, total: None) -> NDArray[np.float32]:
    """Return each sample's margin, the cosine of its pair minus that of its hardest negative, float32 [n], in one pass.

    The negatives are the same 4,096 random samples for all, or all others where there are no more: their captions for
    the picture, their pictures for the caption, and the hardest of both counts. features: of pictures and captions.
    Raises RunError for a damaged file.
    """
    random, count = np.random.default_rng(_MARGIN_SEED), min(MAX_NEGATIVES, features.samples)
    drawn = random.choice(features.samples, count, replace=False)
    drawn.sort()
    pictures, captions = features.rows(drawn).transpose(1, 2, 0).copy()  # contiguous: the product is twice as fast
    found = np.empty(features.samples, np.float32)
    for first, block in features.blocks():
        stop = first + len(block)
        own = np.arange(*np.searchsorted(drawn, [first, stop]))
        found[first:stop] = np.einsum("ij,ij->i", block[:, 0], block[:, 1])
        hardest = np.full(len(block), -np.inf, np.float32)
        for side, others in enumerate((captions, pictures)):
            similarity = block[:, side] @ others
            similarity[drawn[own] - first, own] = -np.inf
            np.maximum(hardest, similarity.max(1), out=hardest)
        found[first:stop] -= hardest
        on_progress(stop, features.samples)
    return found
