"""`thermopile bench loader`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

PARTS = ("single", "two_views", "simclr", "checksum", "cost", "resize", "open")


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench loader --scale small\n"
    "  thermopile bench loader --part single --part resize --json"
)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True,
              help="Measure this part; may be repeated. Default: all.")  # fmt: skip
@click.option("--scale", type=click.Choice(["full", "small"]), default="full", show_default=True,
              help="full: 10 minutes, 4 GB of memory. small: 3 minutes, and no judgement.")  # fmt: skip
@click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
              help="Where temporary files go.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def loader(parts: tuple[str, ...], scale: str, directory: Path | None, as_json: bool) -> None:
    """Measure images a second of the loaders, beside FFCV's own Loader and torch's DataLoader with Pillow.

    \b
    single     one view, crop and flip
    two_views  two views, crop and flip
    simclr     two views, SimCLR's whole recipe
    checksum   what it costs to compare every sample with its checksums
    cost       where ffcv's time goes, on one core
    resize     how near its resize comes to Pillow's
    open       time and memory to open a dataset of a hundred million rows

    The loaders take turns, and the limit is the rate of libjpeg-turbo that only decodes. Each part has a process of
    its own. Let nothing else run meanwhile.
    """
    from ..machine import describe_machine
    from ..measuring import measure_part
    from ..outcomes import Outcome, found_or_problem, print_outcomes
    from .sizes import FULL, SMALL

    sizes = FULL if scale == "full" else SMALL
    outcomes = {}
    for part in parts or PARTS:
        module = f"loader.{part if part in ('cost', 'resize', 'open') else 'rate'}"
        measure = partial(measure_part, module, sizes[part], directory, cure="take --scale small")
        outcomes[part] = Outcome(found_or_problem(measure), sizes[part], judged=scale == "full")
    machine = describe_machine("ffcv", "nvidia-dali-cuda130", "torch", "pillow")
    print_outcomes(outcomes, machine, as_json=as_json)
