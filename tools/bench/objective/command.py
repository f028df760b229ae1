"""`thermopile bench objective`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .contenders import Case
    from .measuring import Peaks, Times

PARTS = ("time", "memory")
_PACKAGES = ("torch", "zarr", "icechunk")


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench objective --scale small\n"
    "  thermopile bench objective --part time --batch 2048 --seconds 30 --json\n"
    "  thermopile bench objective --name clip --batch 256 --batch 512 --dim 128"
)
@click.option("--name", default="isogclr", show_default=True, help="The objective, with its default settings.")
@click.option("--mode", type=click.Choice(["bimodal", "unimodal"]), help="Default: bimodal where the objective has it.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True,
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
    from ..machine import describe_machine
    from ..outcomes import print_machine
    from .contenders import OURS
    from .measuring import measure_peaks, measure_times
    from .sizes import FULL, SMALL
    from .table import print_tables

    sizes, judged = (FULL, True) if scale == "full" else (SMALL, False)
    case = _case(name, mode, dim, device)
    wanted = parts or PARTS
    time_batches = batches or sizes.time_batches if "time" in wanted else ()
    memory_batches = batches or sizes.memory_batches if "memory" in wanted else ()
    times = [
        measure_times(replace(case, batch=batch), sizes.seconds if seconds is None else seconds)
        for batch in time_batches
    ]
    peaks = [measure_peaks(replace(case, batch=batch)) for batch in memory_batches]
    if as_json:
        _print_json(case, times, peaks, judged=judged)
    else:
        print_machine(describe_machine(*_PACKAGES))
        print_tables(times, peaks, judged=judged)
    left_out = [(row.case.batch, row.left_out) for row in times] + [(row.case.batch, row.left_out) for row in peaks]
    if failed := {batch for batch, reasons in left_out if OURS in reasons}:
        raise click.ClickException(f"not measured: {name} at batch {', '.join(map(str, sorted(failed)))}")


def _case(name: str, mode: str | None, dim: int, device: str) -> Case:
    """What is to be measured, at no batch size yet; refuses an objective or a device that there is not."""
    import torch

    from ....trainer.objectives import OBJECTIVES, create_objective
    from .contenders import Case

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


def _print_json(case: Case, times: list[Times], peaks: list[Peaks], *, judged: bool) -> None:
    from ..machine import describe_machine
    from .measuring import asked_figures

    shown = {
        "machine": describe_machine(*_PACKAGES),
        **{key: value for key, value in asdict(case).items() if key != "batch"},
        "time": [row.to_json() for row in times],
        "memory": [row.to_json() for row in peaks],
        "asked": {figure.name: figure.to_json(judged=judged) for figure in asked_figures(times, peaks)},
    }
    click.echo(json.dumps(shown, allow_nan=False))
