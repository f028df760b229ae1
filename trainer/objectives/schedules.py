"""Schedules of settings, as pure functions of training progress."""

import math

from .base import Progress


def cosine_by_epoch(progress: Progress, start: float, end: float, epochs: int) -> float:
    """Return half a cosine from `start` in epoch 0 to `end` in epoch `epochs`, and `end` afterwards.

    Constant within an epoch: it depends on the completed epochs only.
    Source: FastCLIP section 5, for gamma from 1 to gamma_min.
    """
    if progress.epoch >= epochs:
        return end
    return end + 0.5 * (1.0 + math.cos(math.pi * progress.epoch / epochs)) * (start - end)
