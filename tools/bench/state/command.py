"""`thermopile bench state`."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .sizes import Sizes

PARTS = ("rows", "step", "windowed", "snapshot", "retention")


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench state --scale small\n"
    "  thermopile bench state --part rows --part snapshot --json\n"
    "  thermopile bench state --part windowed --samples 20000000 --budget 100 --dir /mnt/fast"
)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True,
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
    from ..machine import describe_machine
    from ..measuring import measure_part
    from ..outcomes import Outcome, found_or_problem, print_outcomes
    from .sizes import FULL, SMALL

    asked = {"samples": samples, "budget_mb": budget, "step_ms": step_ms}
    changes = {name: value for name, value in asked.items() if value is not None}
    of_scale = FULL if scale == "full" else SMALL
    sizes = {part: _changed(part, of_scale[part], changes) for part in parts or PARTS}
    outcomes = {}
    for part, of_part in sizes.items():
        measure = partial(measure_part, f"state.{part}", of_part, directory, cure="lower --samples")
        outcomes[part] = Outcome(found_or_problem(measure), of_part, judged=of_part == FULL[part])
    print_outcomes(outcomes, describe_machine("torch", "zarr", "icechunk"), as_json=as_json)


def _changed(part: str, sizes: Sizes, changes: dict[str, Any]) -> Sizes:
    known = {field.name for field in fields(sizes)}
    for name in changes.keys() - known:
        option = {"budget_mb": "--budget", "step_ms": "--step-ms"}[name]
        raise click.UsageError(f"{option} means nothing to part {part}; choose parts that know it with --part")
    return replace(sizes, **changes)
