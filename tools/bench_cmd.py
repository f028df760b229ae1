"""`thermopile bench`: what a part of thermopile costs on this machine, beside what a user would pick instead."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .bench_state.figure import Figure, Measured
    from .bench_state.sizes import Sizes

STATE_PARTS = ("rows", "step", "windowed", "snapshot", "retention")


@click.group(epilog="\b\nExample:\n  thermopile bench state --part rows")
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
    from .bench_state.machine import describe_machine
    from .bench_state.sizes import FULL, SMALL

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
        _print(machine, outcomes, judged)
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
    from .bench_state.isolated import EndedWithoutAWordError
    from .bench_state.measuring import NoRoomError, measure_part

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


def _print(machine: dict[str, Any], outcomes: dict[str, Measured | str], judged: dict[str, bool]) -> None:
    click.echo(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_bytes'] / 1e9:,.0f} GB, GPU: "
        f"{machine['gpu'] or 'none'}; torch {machine['torch']}, zarr {machine['zarr']}, icechunk {machine['icechunk']}"
    )
    for part, outcome in outcomes.items():
        if isinstance(outcome, str):
            click.echo(f"\n{part}: not measured: {outcome}")
        else:
            _print_part(part, outcome, judged=judged[part])


def _print_part(part: str, measured: Measured, *, judged: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    click.echo(f"\n{part}: {measured.title}")
    click.echo(f"alternative: {measured.versus}; took {measured.seconds:,.0f} s, "
               f"peak memory {measured.peak_bytes / 1e9:.2f} GB")  # fmt: skip
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("figure")
    for heading in ("ours", "alternative", "ratio", "asked"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for figure in measured.figures:
        shown.add_row(figure.label, *_cells(figure, judged=judged))
    Console(highlight=False).print(shown)


def _cells(figure: Figure, *, judged: bool) -> tuple[str, str, str, str]:
    from .bench_state.figure import plain_number

    def with_unit(value: float | None) -> str:
        return "" if value is None else f"{plain_number(value)} {figure.unit}"

    verdict = "" if figure.held is None or not judged else ": held" if figure.held else ": missed"
    ratio = "" if figure.ratio is None else plain_number(figure.ratio)
    return with_unit(figure.ours), with_unit(figure.alternative), ratio, figure.asked + verdict
