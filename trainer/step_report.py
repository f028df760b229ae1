"""What a person wants to know of a run's steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIME = "step_seconds"

PARTS = {
    "data_wait": "data_wait_seconds",
    "store_wait": "store_wait_seconds",
    "forward_backward": "forward_backward_seconds",
    "optimizer": "optimizer_seconds",
    "communication": "communication_seconds",
}
"""Share → the key of metrics.jsonl that it is made of. What is left of a step is `other`: checkpoints and the log."""

BACKLOG = {"write_backlog": "write_backlog_seconds"}
"""Runs beside the parts, so it is none of them."""

TOO_LONG = 0.1
"""Share of the time above which a wait deserves a hint."""

_HINTS = {
    "data_wait": "batches come late. Fewer pixels at conversion (`thermopile convert … --max-size`), more cores or "
    "`data.workers`; `thermopile bench loader` says what this machine can do",
    "store_wait": "rows of state come late. A larger `state.memory_budget`, more `state.prefetch_steps`, or a faster "
    "disk for RUN/state.working; `thermopile bench step` says what this machine can do",
}


def split(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the time of the steps in `lines`: each of PARTS that they have, 0 … 1, and the rest as `other`.

    `write_backlog` is the age of the oldest unwritten put in steps, and may exceed 1. Lines without `step_seconds`,
    such as evaluations, do not count; empty where none has it.
    """
    timed = [line for line in lines if isinstance(line.get(TIME), int | float)]
    total = sum(line[TIME] for line in timed)
    if total <= 0:
        return {}
    shares = {
        name: sum(line.get(key) or 0.0 for line in timed) / total
        for name, key in (PARTS | BACKLOG).items()
        if any(line.get(key) is not None for line in timed)
    }
    # Clocks are read at slightly different moments, so the parts may exceed the whole by a hair.
    return shares | {"other": max(0.0, 1.0 - sum(shares.get(name, 0.0) for name in PARTS))}


def hints(shares: Mapping[str, float]) -> dict[str, str]:
    """A line for each wait above TOO_LONG, by its name: what it means, and what to do about it."""
    return {
        name: f"{name.replace('_', ' ')} {shares[name]:.0%}: {advice}"
        for name, advice in _HINTS.items()
        if shares.get(name, 0.0) > TOO_LONG
    }


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
    """Part of a step -> its share of the steps' time, 0 … 1, on this rank; see `split`."""


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
