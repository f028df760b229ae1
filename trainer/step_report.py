"""What a person wants to know of a run's steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .step_split import split


@dataclass(frozen=True)
class StepReport:
    """What a person wants to know of the steps since the last report."""

    step: int
    """Steps made."""
    total_steps: int
    epoch: int
    loss: float
    """Of the last step."""
    tau_mean: float | None
    """Mean temperature of the last batch, over its sides, or the global one; None where it is not learned."""
    samples_per_second: float
    """Over all ranks."""
    split: dict[str, float]
    """Part of a step -> its share of the steps' time, 0 … 1, on this rank; see `step_split`."""


def report_of(lines: Sequence[Mapping[str, Any]], total_steps: int, batch_size: int, seconds: float) -> StepReport:
    """Of the steps that these lines of metrics.jsonl are of, at least one, made in so many seconds."""
    last = lines[-1]
    taus = [value for name, value in last.items() if name == "tau" or name.endswith("/tau_mean")]
    return StepReport(
        step=int(last["step"]),
        total_steps=total_steps,
        epoch=int(last["epoch"]),
        loss=math.nan if last["loss"] is None else last["loss"],
        tau_mean=sum(taus) / len(taus) if taus else None,
        samples_per_second=len(lines) * batch_size / seconds,
        split=split(lines),
    )
