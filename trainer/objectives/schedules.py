"""Settings that change over training, as pure functions of the progress."""

import math

from .base import Progress


def cosine_by_epoch(progress: Progress, start: float, end: float, epochs: int) -> float:
    """Half a cosine from `start` in epoch 0 down to `end` in epoch `epochs`, and `end` ever after.

    Constant within an epoch: it depends on the whole epochs already made.
    Source: FastCLIP section 5, which falls so from 1 to gamma_min.
    """
    if progress.epoch >= epochs:
        return end
    return end + 0.5 * (1.0 + math.cos(math.pi * progress.epoch / epochs)) * (start - end)
