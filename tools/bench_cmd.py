"""`thermopile bench`: what a part of thermopile costs on this machine, beside what a user would pick instead."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .bench.objective.contenders import Case
    from .bench.objective.measuring import Peaks, Times
    from .bench.state.measured import Measured
    from .bench.state.sizes import Sizes

STATE_PARTS = ("rows", "step", "windowed", "snapshot", "retention")
OBJECTIVE_PARTS = ("time", "memory")


@click.group(epilog="\b\nExamples:\n  thermopile bench state --part rows\n  thermopile bench objective --batch 2048")
def bench() -> None:
    """Measure on this machine."""


@bench.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench state --scale small\n"
    "  thermopile bench state --part rows --part snapshot --json\n"
    "  thermopile bench state --part windowed --samples 20000000 --budget 100 --dir /mnt/fast"
)
@click.option("--part", "parts", type=click.Choice(STATE_PARTS), multiple=True,
              help="Measure this part; may be repeated. Default: all.")  # fmt: skip
@click.option("--scale", type=click.Choice(["full", "small"]), default="full", show_default=True,
              help="full: 20 minutes, 11 GB of memory, 7 GB of disk. small: seconds, and no judgement.")  # fmt: skip
@click.option("--samples", type=click.IntRange(min=1), help="Rows of the state.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), metavar="MB",
              help="Memory for windowed rows; parts step and windowed.")  # fmt: skip
@click.option("--step-ms", type=click.FloatRange(min=0), help="Length of a simulated step; part windowed.")
@click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
              help="Where temporary files go; on the disk that is to be measured.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def state(
    parts: tuple[str, ...], scale: str, samples: int | None, budget: float | None, step_ms: float | None,
    directory: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure the state store beside what a user would pick instead, each part in a process of its own.

    A part for which there is too little memory or disk is left out, which is a failure.
    """
    from .bench.machine import describe_machine
    from .bench.state.sizes import FULL, SMALL

    asked = {"samples": samples, "budget_mb": budget, "step_ms": step_ms}
    changes = {name: value for name, value in asked.items() if value is not None}
    of_scale = FULL if scale == "full" else SMALL
    sizes = {part: _changed(part, of_scale[part], changes) for part in parts or STATE_PARTS}
    outcomes = {part: _measured_or_problem(part, sizes[part], directory) for part in sizes}
    judged = {part: sizes[part] == FULL[part] for part in sizes}
    machine = describe_machine()
    if as_json:
        shown = {part: _to_json(outcomes[part], sizes[part], judged=judged[part]) for part in sizes}
        click.echo(json.dumps({"machine": machine, "parts": shown}, allow_nan=False))
    else:
        _print_machine(machine)
        _print_parts(outcomes, judged)
    if problems := [part for part, outcome in outcomes.items() if isinstance(outcome, str)]:
        raise click.ClickException(f"not measured: {', '.join(problems)}")


def _changed(part: str, sizes: Sizes, changes: dict[str, Any]) -> Sizes:
    known = {field.name for field in fields(sizes)}
    for name in changes.keys() - known:
        option = {"budget_mb": "--budget", "step_ms": "--step-ms"}[name]
        raise click.UsageError(f"{option} means nothing to part {part}; choose parts that know it with --part")
    return replace(sizes, **changes)


def _measured_or_problem(part: str, sizes: Sizes, directory: Path | None) -> Measured | str:
    """What the part found out, or why it could not: the figures of the other parts took long, and are not lost."""
    from ..state_store.errors import StateStoreError
    from .bench.isolated import EndedWithoutAWordError
    from .bench.state.measuring import NoRoomError, measure_part

    try:
        return measure_part(part, sizes, directory)
    except (NoRoomError, EndedWithoutAWordError, StateStoreError, OSError, ValueError) as error:
        return str(error)


def _to_json(outcome: Measured | str, sizes: Sizes, *, judged: bool) -> dict[str, Any]:
    if isinstance(outcome, str):
        return {"sizes": asdict(sizes), "problem": outcome}
    return {
        "title": outcome.title,
        "sizes": asdict(sizes),
        "seconds": outcome.seconds,
        "peak_memory_bytes": outcome.peak_bytes,
        "versus": outcome.versus,
        "figures": {figure.name: figure.to_json(judged=judged) for figure in outcome.figures},
    }


def _print_machine(machine: dict[str, Any]) -> None:
    click.echo(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_bytes'] / 1e9:,.0f} GB, GPU: "
        f"{machine['gpu'] or 'none'}; torch {machine['torch']}, zarr {machine['zarr']}, icechunk {machine['icechunk']}"
    )


def _print_parts(outcomes: dict[str, Measured | str], judged: dict[str, bool]) -> None:
    from .bench.state.table import print_part

    for part, outcome in outcomes.items():
        if isinstance(outcome, str):
            click.echo(f"\n{part}: not measured: {outcome}")
        else:
            print_part(part, outcome, judged=judged[part])


@bench.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench objective --scale small\n"
    "  thermopile bench objective --part time --batch 2048 --seconds 30 --json\n"
    "  thermopile bench objective --name clip --batch 256 --batch 512 --dim 128"
)
@click.option("--name", default="isogclr", show_default=True, help="The objective, with its default settings.")
@click.option("--mode", type=click.Choice(["bimodal", "unimodal"]), help="Default: bimodal where the objective has it.")
@click.option("--part", "parts", type=click.Choice(OBJECTIVE_PARTS), multiple=True,
              help="Measure this part; may be repeated. Default: both.")  # fmt: skip
@click.option("--scale", type=click.Choice(["full", "small"]), default="full", show_default=True,
              help="full: 10 minutes, up to 6 GB of memory. small: seconds, and no judgement.")  # fmt: skip
@click.option("--batch", "batches", type=click.IntRange(min=2), multiple=True, metavar="N",
              help="Batch size, for both parts; may be repeated. Default: those of the scale.")  # fmt: skip
@click.option("--dim", type=click.IntRange(min=1), default=512, show_default=True, help="Length of a feature row.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0),
              help="Time for each batch size of part time, five rounds at least. Default: 60, small: 0.1.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def objective(
    name: str, mode: str | None, parts: tuple[str, ...], scale: str, batches: tuple[int, ...], dim: int, device: str,
    seconds: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure what a step of an objective costs: forward, backward and new state.

    \b
    Beside it, isogclr on pairs has all three, the others the first:
    - three bare products of its size, the least that it can take;
    - its equations written plainly and differentiated by torch;
    - the path of FastCLIP's published code: two products, masks, bounds.

    Let nothing else run meanwhile. What there is too little memory for is left out; without the objective itself
    that is a failure.
    """
    from .bench.machine import describe_machine
    from .bench.objective.contenders import OURS
    from .bench.objective.measuring import measure_peaks, measure_times
    from .bench.objective.sizes import FULL, SMALL
    from .bench.objective.table import print_tables

    sizes, judged = (FULL, True) if scale == "full" else (SMALL, False)
    case = _case(name, mode, dim, device)
    wanted = parts or OBJECTIVE_PARTS
    time_batches = batches or sizes.time_batches if "time" in wanted else ()
    memory_batches = batches or sizes.memory_batches if "memory" in wanted else ()
    times = [
        measure_times(replace(case, batch=batch), sizes.seconds if seconds is None else seconds)
        for batch in time_batches
    ]
    peaks = [measure_peaks(replace(case, batch=batch)) for batch in memory_batches]
    if as_json:
        _print_objective_json(case, times, peaks, judged=judged)
    else:
        _print_machine(describe_machine())
        print_tables(times, peaks, judged=judged)
    left_out = [(row.case.batch, row.left_out) for row in times] + [(row.case.batch, row.left_out) for row in peaks]
    if failed := {batch for batch, reasons in left_out if OURS in reasons}:
        raise click.ClickException(f"not measured: {name} at batch {', '.join(map(str, sorted(failed)))}")


def _case(name: str, mode: str | None, dim: int, device: str) -> Case:
    """What is to be measured, at no batch size yet; refuses an objective or a device that there is not."""
    import torch

    from ..trainer.objectives import OBJECTIVES, create_objective
    from .bench.objective.contenders import Case

    if mode is None:
        mode = next(iter(OBJECTIVES[name].settings_of_mode)) if name in OBJECTIVES else "bimodal"
    try:
        create_objective(name, mode)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no GPU; use --device cpu")
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return Case(name, mode, batch=0, dim=dim, device=chosen)


def _print_objective_json(case: Case, times: list[Times], peaks: list[Peaks], *, judged: bool) -> None:
    from .bench.machine import describe_machine
    from .bench.objective.measuring import asked_figures

    shown = {
        "machine": describe_machine(),
        **{key: value for key, value in asdict(case).items() if key != "batch"},
        "time": [row.to_json() for row in times],
        "memory": [row.to_json() for row in peaks],
        "asked": {figure.name: figure.to_json(judged=judged) for figure in asked_figures(times, peaks)},
    }
    click.echo(json.dumps(shown, allow_nan=False))
