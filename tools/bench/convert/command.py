"""`thermopile bench convert`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

PARTS = ("kept", "encoded")


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench convert --scale small\n"
    "  thermopile bench convert --part kept --dir /mnt/fast"
)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True,
              help="Measure this part; may be repeated. Default: both.")  # fmt: skip
@click.option("--scale", type=click.Choice(["full", "small"]), default="full", show_default=True,
              help="full: 3 minutes, 1 GB of disk. small: seconds, and no judgement.")  # fmt: skip
@click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
              help="Where temporary files go; on the disk that is to be measured.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def convert(parts: tuple[str, ...], scale: str, directory: Path | None, as_json: bool) -> None:
    """Measure a conversion of webdataset tars, beside a plain loop that reads, decodes and writes the same.

    \b
    kept     JPEGs are verified and kept byte for byte
    encoded  pictures are reduced to a short side of 224 pixels and encoded again

    Both take turns. Let nothing else run meanwhile.
    """
    from ..machine import describe_machine
    from ..measuring import measure_part
    from ..outcomes import Outcome, found_or_problem, print_outcomes
    from .sizes import FULL, SMALL

    sizes = FULL if scale == "full" else SMALL
    outcomes = {}
    for part in parts or PARTS:
        measure = partial(measure_part, "convert.rate", sizes[part], directory, cure="take --scale small")
        outcomes[part] = Outcome(found_or_problem(measure), sizes[part], judged=scale == "full")
    print_outcomes(outcomes, describe_machine("ffcv", "pillow"), as_json=as_json)
