"""Doubted pairs: negatives outweigh the positive, as where a caption is wrong, so the loss leaves them out."""

from pydantic import Field
from torch import Tensor

from .base import Settings

_LEAST_MEAN = 0.1
"""Bound of the mean that factors are divided by, so that few samples that are left get no huge steps."""


class DoubtSettings(Settings, frozen=True):
    """When an objective of image-text pairs doubts some of them."""

    doubt_after: int | None = Field(default=None, ge=1)
    """Epochs, 1 or more, after which a pair's terms of the loss count nothing while its log s, summed over both sides,
    is above 0. Its temperature stays meanwhile; its log s goes on, so it may come back. Unset: never. Mode bimodal.
    Ours."""


def is_doubted(log_s: Tensor) -> Tensor:
    """Return which pairs may have a wrong caption, bool [b]; log_s, [2, b], before the step: -inf for an unseen pair.

    A model learns right pairs long before it learns wrong ones by heart. Until then a wrong pair's positive is a random
    one, and the mean of its negatives' exp(h / tau) is above 1 more often than not.
    """
    return log_s.sum(0) > 0


def with_mean_of_one(factors: Tensor) -> Tensor:
    """Return factors, [b], over their mean: else a learned temperature would have fewer samples to follow."""
    return factors / factors.mean().clamp(min=_LEAST_MEAN)
