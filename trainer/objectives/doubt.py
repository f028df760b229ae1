"""Doubted pairs: the loss leaves out pairs whose negatives outweigh the positive, as a wrong caption's do."""

from pydantic import Field
from torch import Tensor

from .base import Settings

_LEAST_MEAN = 0.1
"""Lower bound of the mean by which factors are divided, so that a few remaining samples get no huge steps."""


class DoubtSettings(Settings, frozen=True):
    doubt_after: int | None = Field(default=None, ge=1)
    """Epochs, 1 or more, after which a pair's terms of the loss do not count while its log s, summed over both sides,
    is above 0. Its temperature then stays, and its log s is still updated, so the pair may return. Unset: never. Mode
    bimodal. Ours."""


def is_doubted(log_s: Tensor) -> Tensor:
    """Return which pairs may have a wrong caption, bool [b]; log_s, [2, b], before the step: -inf for an unseen pair.

    A model learns right pairs long before it learns wrong pairs by heart. Until then a wrong pair's positive is random,
    and the mean of its negatives' exp(h / tau) is above 1 more often than not.
    """
    return log_s.sum(0) > 0


def with_mean_of_one(factors: Tensor) -> Tensor:
    """Return factors, [b], over their mean: otherwise a learned temperature would follow fewer samples."""
    return factors / factors.mean().clamp(min=_LEAST_MEAN)
