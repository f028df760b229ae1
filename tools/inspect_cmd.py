"""`thermopile inspect`: what the temperatures of a run say, in the terminal and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .inspection.run import Inspection
    from .inspection.survey import Survey


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile inspect runs/glyphs\n"
    "  thermopile inspect runs/glyphs --at step-400 --json\n"
    "  thermopile inspect runs/cc3m --data /mnt/elsewhere/cc3m --by folder --by width"
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--at", default="latest", show_default=True, metavar="TAG|ID", help="The snapshot to look at.")
@click.option("--by", multiple=True, default=("group",), metavar="COLUMN", show_default="group",
              help="Group by a column of the samples table, or by `folder`. May be repeated.")  # fmt: skip
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Where the run's dataset is now, if it was moved.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def inspect(run: Path, at: str, by: tuple[str, ...], data: Path | None, as_json: bool) -> None:
    """Show what the temperatures of RUN say, and write RUN/report/report.html.

    Works while the run trains: it reads the last snapshot of the state and changes nothing.
    """
    from ..trainer.run_directory import RunDirectory
    from .inspection.run import read_run
    from .inspection.summary import to_json
    from .inspection.survey import survey
    from .progress import progress_bar
    from .report.page import write_report

    inspection = read_run(RunDirectory(run), at=at, data=data)
    rows = 2 * inspection.reader.samples if inspection.reader else 0
    with progress_bar("reading the state", rows, hidden=rows < ROWS_IN_TWO_SECONDS) as bar:
        found = survey(inspection, tuple(dict.fromkeys(by)), bar.update)
    report = write_report(inspection, found)
    if as_json:
        click.echo(json.dumps(to_json(inspection, found, report), allow_nan=False))
        return
    _print_summary(inspection, found)
    click.echo(report)


ROWS_IN_TWO_SECONDS = 1_000_000


def _print_summary(inspection: Inspection, survey: Survey | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from .inspection.advice import warnings
    from .inspection.summary import facts, sparkline, table
    from .plain_text import plain_text

    for word, value in facts(inspection, survey):
        click.echo(f"{word:11}{plain_text(value, most=1000)}")
    for warning in warnings(inspection, survey) if survey else ():
        click.echo(f"{'warning':11}{plain_text(warning, most=1000)}")
    for note in survey.notes if survey else inspection.notes:
        click.echo(f"{'note':11}{plain_text(note, most=1000)}")
    if survey is None or not survey.sides:
        return
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("tau of the visited samples")
    for side in survey.sides:
        shown.add_column(side.label, justify="right")
    for row in table(inspection, survey):
        shown.add_row(row.label, *row.cells)
    shown.add_row("lowest … highest", *(sparkline(side.tau) for side in survey.sides))
    Console(highlight=False).print(shown)
