"""Summaries of a run's steps for people."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import TrainConfig

TIME = "step_seconds"

PARTS = ("data_wait", "fetch_wait", "store_wait", "forward_backward", "optimizer", "communication")
"""In metrics.jsonl as `data_wait_seconds` …. The rest of a step is `other`: checkpoints and the log."""

TOO_LONG = 0.1
"""Share of the time above which a wait gets a hint."""
TOO_SILENT = 0.01
"""Share of anchors without gradient above which they get a hint."""
SETTLING_EPOCHS = 2
"""Epochs in which anchors may be silent, because their s has seen few batches."""
USUAL_TAU_STEP = 0.1

_HINTS = {
    "data_wait": "batches arrive late. Convert with fewer pixels (`thermopile convert … --max-size`), use more cores "
    "or more `data.workers`; `thermopile bench loader` measures what this machine can do",
    "fetch_wait": "samples arrive late from the object store. Raise `data.cache`, so that more is read ahead, or train "
    "nearer to the store; `thermopile bench loader` measures what this machine can do",
    "store_wait": "rows of state arrive late. Raise `state.memory_budget` or `state.prefetch_steps`, or use a faster "
    "disk for RUN/state.working; `thermopile bench step` measures what this machine can do",
}


def split(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the shares of time over the steps in `lines`: PARTS that occur, 0 … 1, and the rest as `other`.

    `write_backlog` is the age of the oldest unwritten put in steps, and may exceed 1. Lines without `step_seconds`,
    such as evaluations, are ignored; empty if no line has it.
    """
    timed = [line for line in lines if isinstance(line.get(TIME), int | float)]
    total = sum(line[TIME] for line in timed)
    if total <= 0:
        return {}
    shares = {
        name: sum(line.get(f"{name}_seconds") or 0.0 for line in timed) / total
        for name in (*PARTS, "write_backlog")  # the backlog is written concurrently, so it is not part of a step
        if any(line.get(f"{name}_seconds") is not None for line in timed)
    }
    # The clocks are read at slightly different times, so the sum of the parts may slightly exceed the total.
    return shares | {"other": max(0.0, 1.0 - sum(shares.get(name, 0.0) for name in PARTS))}


def share_silent(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of anchors that gave no gradient, mean over sides and the steps after SETTLING_EPOCHS; None if
    there are no such steps, or taus are not individual."""
    lines = [line for line in lines if (line.get("epoch") or 0) >= SETTLING_EPOCHS]
    sides = {name.removesuffix("tau_mean") for line in lines for name in line if name.endswith("/tau_mean")}
    found = [line.get(f"{side}share_silent") for line in lines for side in sides]
    known = [share for share in found if isinstance(share, int | float)]
    return sum(known) / len(known) if known else None


def hints(lines: Sequence[Mapping[str, Any]], objective: Mapping[str, Any]) -> dict[str, str]:
    """Return a hint for each wait above TOO_LONG, and for TOO_SILENT anchors, by name: its meaning and a cure.

    objective: the objective's settings, so that no cure is named that the run has taken.
    """
    shares, silent = split(lines), share_silent(lines)
    found = {
        name: f"{name.replace('_', ' ')} {shares[name]:.0%}: {advice}"
        for name, advice in _HINTS.items()
        if shares.get(name, 0.0) > TOO_LONG
    }
    if silent is not None and silent > TOO_SILENT:
        found["silent"] = (
            f"silent anchors {silent:.1%}: negatives weigh next to nothing against their s, so they give no "
            f"gradient. {_cure_of_silence(objective)}"
        )
    return found


def _cure_of_silence(objective: Mapping[str, Any]) -> str:
    """Name the next way to let s follow the temperatures: first a limit of each step, then a smaller rate."""
    tau_step, eta = objective.get("tau_step"), objective.get("eta")  # of a user's own objective, they may be anything
    if tau_step is None or (isinstance(tau_step, int | float) and tau_step > USUAL_TAU_STEP):
        return f"Their temperatures may move faster than s can follow: set `objective.tau_step` to {USUAL_TAU_STEP}"
    example = f", to {eta / 2:g} for example" if isinstance(eta, int | float) and eta else ""
    return f"No harm where few of a sample's near-copies meet in a batch; else lower `objective.eta`{example}"


@dataclass(frozen=True)
class StepReport:
    """Summary of the steps since the last report."""

    step: int
    """Steps completed."""
    total_steps: int
    epoch: int
    loss: float
    """Loss of the last step."""
    tau_mean: float | None
    """Mean temperature of the last batch over its sides, or the global temperature; None if it is not learned."""
    samples_per_second: float
    """Over all ranks; places of batches, with holes."""
    split: dict[str, float]
    """Part of a step -> its share of time, 0 … 1, on this rank; see `split`."""
    hints: dict[str, str]
    """Name of a problem -> its meaning and a cure; see `hints`."""


def report_of(lines: Sequence[Mapping[str, Any]], total_steps: int, config: TrainConfig, seconds: float) -> StepReport:
    """Summarise the steps in `lines` of metrics.jsonl (at least one), which took `seconds`."""
    last = lines[-1]
    taus = [value for name, value in last.items() if name == "tau" or name.endswith("/tau_mean")]
    return StepReport(
        step=int(last["step"]),
        total_steps=total_steps,
        epoch=int(last["epoch"]),
        loss=math.nan if last["loss"] is None else last["loss"],
        tau_mean=sum(taus) / len(taus) if taus else None,
        samples_per_second=len(lines) * config.batch_size / seconds,
        split=split(lines),
        hints=hints(lines, config.objective.settings),
    )
