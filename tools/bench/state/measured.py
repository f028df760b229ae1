"""How the time of training steps is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class StepSeconds:
    """How long one training step took, and how long of that the calls into the store held it up."""

    store: float
    whole: float


def store_share(steps: Sequence[StepSeconds]) -> float:
    """The share of these steps that went by in the store's calls, in percent."""
    return 100 * sum(step.store for step in steps) / sum(step.whole for step in steps)


def excess(during: Sequence[float], quiet: Sequence[float]) -> float:
    """What `during` took more, in all, than as many times the median of `quiet`; 0 where it took less."""
    return max(0.0, sum(during) - len(during) * median(quiet))
