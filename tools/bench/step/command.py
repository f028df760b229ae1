"""`thermopile bench step`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

PARTS = ("overhead", "checkpoint", "large_checkpoint")


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench step --scale small\n"
    "  thermopile bench step --part overhead\n"
    "  thermopile bench step --part large_checkpoint --dir /mnt/fast --json"
)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True,
              help="Measure this part; may be repeated. Default: all.")  # fmt: skip
@click.option("--scale", type=click.Choice(["full", "small"]), default="full", show_default=True,
              help="full: 5 minutes, 3 GB of memory, 2 GB of disk. small: seconds, and no judgement.")  # fmt: skip
@click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
              help="Where temporary files go; on the disk that checkpoints are to be measured on.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def step(parts: tuple[str, ...], scale: str, directory: Path | None, as_json: bool) -> None:
    """Measure what the trainer adds to the computation of a step, on the CPU, with batches in memory.

    \b
    overhead          its step, beside a bare loop of the same encoders, objective and optimiser
    checkpoint        how long a checkpoint holds it up, beside torch.save in the training thread
    large_checkpoint  the same with the parameters of a ResNet-50

    Contenders take turns in one process. Let nothing else run meanwhile.
    """
    from ..machine import describe_machine
    from ..measuring import measure_part
    from ..outcomes import Outcome, found_or_problem, print_outcomes
    from .sizes import FULL, SMALL

    sizes = FULL if scale == "full" else SMALL
    outcomes = {}
    for part in parts or PARTS:
        module = "step.overhead" if part == "overhead" else "step.checkpoint"
        measure = partial(measure_part, module, sizes[part], directory, cure="take --scale small")
        outcomes[part] = Outcome(found_or_problem(measure), sizes[part], judged=scale == "full")
    print_outcomes(outcomes, describe_machine("torch", "zarr", "icechunk"), as_json=as_json)
