"""How far the pair of each sample is ahead of its hardest negative, by the features of a run on pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .. import OnDone
from .confirmation import MAX_NEGATIVES
from .features_file import FeaturesFile

_SEED = 2026


def margins(features: FeaturesFile, on_progress: OnDone = lambda done, total: None) -> NDArray[np.float32]:
    """Return the cosine of each pair minus that of its hardest negative, float32 [n], in one pass over the file.

    The negatives are the same 4,096 random samples for all, or all others where there are no more: their captions for
    the picture, their pictures for the caption, and the hardest of both counts. features: of pictures and captions.
    Raises RunError for a damaged file.
    """
    drawn = np.random.default_rng(_SEED).choice(features.samples, min(MAX_NEGATIVES, features.samples), replace=False)
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
