"""The neighbours of samples by the run's features: nearest pictures and captions, hardest negatives, margins."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ....pipeline.cores import cores
from .. import TO_LIST, AsJson, Float32s, Float64s, Int64s, OnDone, named, silent
from ..opening import check_ids
from .confirmation import MAX_NEGATIVES
from .features_file import FeaturesFile

PICTURES, CAPTIONS = "pictures", "captions"
ANCHORS = {1: ("sample",), 2: ("image", "text")}
"""Number of sides of the features -> sides of the state of an objective that has one."""

_LEAST_TAU = 1e-9
"""At lower ones, exponents leave the range of float32; no run has any."""
_SAMPLES_PER_THREAD = 100_000
_MARGIN_SEED = 2026
_CURVE_RANKS = 200
"""At most, of a curve of p*; evenly spaced on a logarithmic axis."""


@dataclass(frozen=True)
class Ranking:
    """Other samples, the most similar first; of ties, the lowest ids first."""

    sample_ids: Annotated[Int64s, TO_LIST]
    """int64 [k]."""
    similarity: Annotated[Float32s, TO_LIST]
    """float32 [k]: cosine similarity of the features."""
    weights: Annotated[Float64s | None, AsJson(lambda p: p if p is None else p.tolist()), named("p")] = None
    """float64 [k]: p*, the softmax over all negatives; None without a temperature."""
    curve: Annotated[list[tuple[int, float]] | None, named("p_by_rank")] = None
    """Ranks of negatives, 1 for the most similar one up to their number, and p* there; None without a temperature."""


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
    """Compare a sample with all others: exact, in one pass over the file by a thread per core.

    Takes 4 bytes of memory a sample, for pairs 16.
    count: samples per ranking; fewer if there are fewer others. tau: side of the state -> the sample's temperature;
    its negatives have no weights without one, or if it is not positive.

    The weights are p*_ij = exp((s_ij - s_ii) / tau_i) / sum_k exp((s_ik - s_ii) / tau_i) over all other samples: the
    distribution over the negatives at which the robust loss takes its worst case (iSogCLR eq 6, Figure 3, appendix A).
    The similarity s_ii of the positive pair cancels, so a run on images needs no second view: one without augmentation
    stands for both views of each sample. Raises ConfigError for an unknown id, RunError for a damaged file.
    """
    check_ids([sample_id], features.samples)
    (own,) = features.rows(np.array([sample_id]))
    sides, parts = len(own), min(cores(), 1 + features.samples // _SAMPLES_PER_THREAD)
    similarity = np.empty((sides, sides, features.samples), np.float32)  # of an anchor's side and the others' side

    def compare(part: range) -> None:
        for first, block in features.blocks(part.start, part.stop):
            for anchor, other in np.ndindex(sides, sides):
                # A product with a matrix of few columns takes longer than one for each column.
                similarity[anchor, other, first : first + len(block)] = block[:, other] @ own[anchor]

    edges = [features.samples * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(parts) as threads:
        list(threads.map(compare, map(range, edges[:-1], edges[1:])))
    similarity[:, :, sample_id] = -np.inf
    against = {"image": (0, sides - 1), "sample": (0, 0), "text": (sides - 1, 0)}
    return Neighbours(
        nearest={(PICTURES, CAPTIONS)[side]: _ranking(similarity[side, side], count) for side in range(sides)},
        negatives={side: _ranking(similarity[against[side]], count, value) for side, value in tau.items()},
        pair_similarity=float(own[0] @ own[1]) if sides == 2 else None,
    )


def _ranking(similarity: Float32s, count: int, tau: float | None = None) -> Ranking:
    """Rank the most similar of all samples, float32 [n], -inf for the sample itself."""
    count = min(count, len(similarity) - 1)
    places = np.flatnonzero(similarity >= np.partition(similarity, -count)[-count])
    ids = places[np.argsort(-similarity[places], kind="stable")[:count]]
    shown = np.minimum(similarity[ids], 1)  # float16 rounds some rows to a norm above 1
    if not count or tau is None or not _LEAST_TAU < tau < math.inf:
        return Ranking(ids, shown)
    # Differences to the highest are exact in float32 where they matter; similarity / tau would not be.
    differences = similarity - similarity[ids[0]]
    total = np.exp(differences * np.float32(1 / tau)).sum(dtype=np.float64)
    ranks = np.unique(np.geomspace(1, len(similarity) - 1, _CURVE_RANKS).round().astype(np.int64))
    at_ranks = np.exp(np.sort(differences)[-ranks].astype(np.float64) / tau) / total
    curve = list(zip(ranks.tolist(), at_ranks.tolist(), strict=True))
    return Ranking(ids, shown, np.exp(differences[ids].astype(np.float64) / tau) / total, curve)


def margins(features: FeaturesFile, on_progress: OnDone = silent) -> Float32s:
    """Return each sample's margin, the cosine of its pair minus that of its hardest negative, float32 [n], in one pass.

    The negatives are the same 4,096 random samples for all, or all others where there are no more: their captions for
    the picture, their pictures for the caption, and the hardest of both counts. features: of pictures and captions.
    Raises RunError for a damaged file.
    """
    random, count = np.random.default_rng(_MARGIN_SEED), min(MAX_NEGATIVES, features.samples)
    drawn = np.sort(random.choice(features.samples, count, replace=False))
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
