"""Draw the caption that an epoch uses for a sample with several captions."""

import numpy as np
from numpy.typing import NDArray

from .augment import view_key
from .rng import compiled, uniform

_NOT_A_VIEW = np.uint64(1 << 32)
"""Replaces a view's number in the key, so that the caption does not depend on the crop."""


@compiled
def draw_captions(
    seed: np.uint64, epoch: np.uint64, sample_ids: NDArray[np.int64], captions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the caption drawn for each sample in this epoch, int64 [b] in 0 … captions - 1, all equally likely.

    captions: number of captions of each sample, int64 [b], at least 1.
    """
    drawn = np.empty(len(sample_ids), np.int64)
    for i in range(len(sample_ids)):
        key = view_key(seed, epoch, np.uint64(sample_ids[i]), _NOT_A_VIEW)
        drawn[i] = int(uniform(key, np.uint64(0)) * captions[i])
    return drawn
