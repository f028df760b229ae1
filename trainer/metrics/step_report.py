"""Summaries of a run's steps for people."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..config import TrainConfig

Lines = Sequence[Mapping[str, Any]]

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
RECENT_STEPS = 100
"""Number of steps to average over."""
JUDGED_AFTER, JUDGED_STEPS = 200, 10
"""Steps after which a run without a longer warm-up may be judged collapsed, and the fewest that are judged. Until then
a sound run may be near chance: iSogCLR on glyphs in batches of 16 found 1.7 samples a batch after 100 steps and 3.4
after 200, with pictures of mean cosine 0.998 and 0.91; AUC-CL found 2.4, other objectives more."""

_HINTS = {
    "data_wait": "batches arrive late. Convert with fewer pixels (`thermopile convert … --max-size`), use more cores "
    "or more `data.workers`; `thermopile bench loader` measures what this machine can do",
    "fetch_wait": "samples arrive late from the object store. Raise `data.cache`, so that more is read ahead, or train "
    "nearer to the store; `thermopile bench loader` measures what this machine can do",
    "store_wait": "rows of state arrive late. Raise `state.memory_budget` or `state.prefetch_steps`, or use a faster "
    "disk for RUN/state.working; `thermopile bench step` measures what this machine can do",
}


def percent(share: float, digits: int = 0) -> str:
    """Return a share, 0 … 1, in percent, rounded; 0% and 100% are shown only if exact."""
    least, shown = 10.0 ** -(2 + digits), f"{share:.{digits}%}"
    if share > 0 and shown == f"{0:.{digits}%}":
        return f"under {least:.{digits}%}"
    return f"over {1 - least:.{digits}%}" if share < 1 and shown == f"{1:.{digits}%}" else shown


def split(lines: Lines) -> dict[str, float]:
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


def share_silent(lines: Lines) -> float | None:
    """Return the share of anchors that gave no gradient, mean over sides and the steps after SETTLING_EPOCHS; None if
    there are no such steps, or taus are not individual."""
    lines = [line for line in lines if (line.get("epoch") or 0) >= SETTLING_EPOCHS]
    sides = {name.removesuffix("tau_mean") for line in lines for name in line if name.endswith("/tau_mean")}
    found = [line.get(f"{side}share_silent") for line in lines for side in sides]
    known = [share for share in found if isinstance(share, int | float)]
    return sum(known) / len(known) if known else None


def hints(lines: Lines, objective: Mapping[str, Any]) -> dict[str, str]:
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
        slower = slower_temperatures(objective)
        why = "Their temperatures may move faster than s can follow:"
        if "eta" in slower:
            why = "No harm where few of a sample's near-copies meet in a batch; else"
        found["silent"] = (
            f"silent anchors {silent:.1%}: negatives weigh next to nothing against their s, so they give no "
            f"gradient. {why} {slower}"
        )
    return found


def slower_temperatures(objective: Mapping[str, Any]) -> str:
    """Return the next way to let s follow the temperatures: first a limit of each step, then a smaller rate.

    objective: its settings. A user's own objective may have anything under these names.
    """
    tau_step, eta = objective.get("tau_step"), objective.get("eta")
    if tau_step is None or (isinstance(tau_step, int | float) and tau_step > USUAL_TAU_STEP):
        return f"set `objective.tau_step` to {USUAL_TAU_STEP}"
    return "lower `objective.eta`" + (f", to {eta / 2:g} for example" if isinstance(eta, int | float) and eta else "")


def collapse(lines: Lines, config: TrainConfig) -> str:
    """Return how the run has collapsed, by the steps in `lines` after its warm-up, and likely causes; "" if it has not.

    Every batch finds one of its samples by chance, whatever its size; of pictures alone, half a sample. Only twice that
    tells a run that learns: the bound is three standard errors below, so that few steps judge nothing.
    """
    warmup, epoch = config.optimizer.warmup_parts
    lines = [line for line in lines if line["step"] > max(warmup, JUDGED_AFTER) and line.get("epoch", 0) >= epoch]
    if len(lines) < JUDGED_STEPS:
        return ""
    likeness, found = _of_sides(lines, "likeness"), _of_sides(lines, "retrieval_accuracy")
    alike = [side for side, values in likeness.items() if fmean(values) > 0.999]  # of constant pictures 0.9996
    by_chance, hits = sum(map(len, found.values())), config.batch_size * sum(map(math.fsum, found.values()))
    # The loss of features that are alike, where it is a cross-entropy over the batch.
    ln = math.log({"clip": config.batch_size, "simclr": 2 * config.batch_size - 1}.get(config.objective.name, 1))
    if alike:
        evidence = f"all {' and all '.join(alike)} features are alike"
    elif config.batch_size > 2 and hits < 2 * by_chance - 3 * math.sqrt(2 * by_chance):
        evidence = f"samples are told from the others of a batch by chance ({hits / by_chance / config.batch_size:.2%})"
    elif ln and abs(fmean(line.get("loss") or math.nan for line in lines) / ln - 1) < 1e-3:
        evidence = f"the loss stays at {ln:.4f}, as if all features were alike"
    else:
        return ""
    causes = [f"optimizer.lr = {config.optimizer.lr:g} is too high or too low", "a temperature is far off"]
    causes += ["fp16 overflows (set precision = bf16 or float32)"] * (config.precision == "fp16")
    causes.insert(0 if 0 < len(alike) < len(likeness) else len(causes), "all pictures or all captions are the same")
    return f"the run has collapsed or learns nothing: {evidence}. Likely causes: {', or '.join(causes)}"


def _of_sides(lines: Lines, name: str) -> dict[str, list[float]]:
    """Return the values of a metric by side, from the lines that have one."""
    sides = dict.fromkeys(key for line in lines for key in line if key.endswith(f"/{name}"))
    values = {side: [line[side] for line in lines if isinstance(line.get(side), float)] for side in sides}
    return {side.removesuffix(f"/{name}"): of_side for side, of_side in values.items() if of_side}


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
    retrieval_accuracy: float | None
    """Share of anchors nearest to their positive, mean over sides and steps; None if the objective has none."""
    samples_per_second: float
    """Over all ranks; places of batches, with holes."""
    split: dict[str, float]
    """Part of a step -> its share of time, 0 … 1, on this rank; see `split`."""
    hints: dict[str, str]
    """Name of a problem -> its meaning and a cure; see `hints` and `collapse`."""


def report_of(lines: Lines, recent: Lines, total_steps: int, config: TrainConfig, seconds: float) -> StepReport:
    """Summarise the steps in `lines` of metrics.jsonl (at least one), which took `seconds`.

    recent: these and the steps before them, RECENT_STEPS at most, by which a collapse is judged.
    """
    last, collapsed, found = lines[-1], collapse(recent, config), _of_sides(lines, "retrieval_accuracy").values()
    taus = [value for name, value in last.items() if name == "tau" or name.endswith("/tau_mean")]
    return StepReport(
        step=int(last["step"]),
        total_steps=total_steps,
        epoch=int(last["epoch"]),
        loss=math.nan if last["loss"] is None else last["loss"],
        tau_mean=sum(taus) / len(taus) if taus else None,
        retrieval_accuracy=fmean(map(fmean, found)) if found else None,
        samples_per_second=len(lines) * config.batch_size / seconds,
        split=split(lines),
        hints=hints(lines, config.objective.settings) | ({"collapse": collapsed} if collapsed else {}),
    )
