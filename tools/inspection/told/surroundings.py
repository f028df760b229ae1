"""How many samples lie near each of some samples in the features of one kind, and which lie nearest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NEAR = 0.7
"""Cosine similarity from which a sample counts as near."""
NEAREST = 3
_ROWS_AT_ONCE = 1024


class Surroundings(NamedTuple):
    """What lies around m samples, among them."""

    near: NDArray[np.float64]
    """float64 [m]: how many of the others are near."""
    nearest: NDArray[np.int64]
    """int64 [m, 3]: places of the nearest others, the nearest first."""
    similarity: NDArray[np.float32]
    """float32 [m, 3]: their cosine similarity."""


def surroundings(features: NDArray[np.float32]) -> Surroundings:
    """Compare m samples, float32 [m, d], rows of norm 1, at least 4, with each other."""
    m = len(features)
    found = Surroundings(np.empty(m), np.empty((m, NEAREST), np.int64), np.empty((m, NEAREST), np.float32))
    for first in range(0, m, _ROWS_AT_ONCE):
        here = slice(first, min(first + _ROWS_AT_ONCE, m))
        similarity = features[here] @ features.T
        rows = np.arange(len(similarity))[:, None]
        similarity[rows[:, 0], first + rows[:, 0]] = -np.inf
        found.near[here] = (similarity > NEAR).sum(1)
        some = np.argpartition(similarity, m - NEAREST, axis=1)[:, m - NEAREST :]
        order = np.argsort(-similarity[rows, some], axis=1)
        found.nearest[here] = some[rows, order]
        found.similarity[here] = similarity[rows, found.nearest[here]]
    return found
