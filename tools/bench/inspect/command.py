"""`thermopile bench inspect`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import click

PARTS = ("beside_pandas", "alone")


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench inspect --scale small\n"
    "  thermopile bench inspect --part beside_pandas --dir /mnt/fast\n"
    "  thermopile bench inspect --part alone --rows 20000000 --json"
)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True,
              help="Measure this part; may be repeated. Default: both.")  # fmt: skip
@click.option("--scale", type=click.Choice(["full", "small"]), default="full", show_default=True,
              help="full: 8 minutes, 8 GB of memory, 10 GB of disk. small: seconds, and no judgement.")  # fmt: skip
@click.option("--rows", type=click.IntRange(min=1000), help="Samples of the run, rounded up to whole shards.")
@click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
              help="Where temporary files go.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(parts: tuple[str, ...], scale: str, rows: int | None, directory: Path | None, as_json: bool) -> None:
    """Measure a report on a run of many samples, made for the purpose: its time, its memory and its page.

    \b
    beside_pandas  10⁷ samples, and the exported state looked at with pandas, turn by turn
    alone          10⁸ samples, without pandas

    A part for which there is too little memory or disk is left out, which is a failure.
    """
    from ..machine import describe_machine
    from ..measuring import measure_part
    from ..outcomes import Outcome, found_or_problem, print_outcomes
    from .sizes import FULL, SMALL

    of_scale = FULL if scale == "full" else SMALL
    outcomes = {}
    for part in parts or PARTS:
        sizes = replace(of_scale[part], rows=rows or of_scale[part].rows)
        measure = partial(measure_part, "inspect.report", sizes, directory, cure="lower --rows")
        outcomes[part] = Outcome(found_or_problem(measure), sizes, judged=sizes == FULL[part])
    print_outcomes(outcomes, describe_machine("torch", "zarr", "icechunk", "pandas", "matplotlib"), as_json=as_json)
