"""`thermopile inspect`: what the temperatures of a run say, in the terminal and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .inspection import Inspection
    from .temperatures import Temperatures


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile inspect runs/glyphs\n"
    "  thermopile inspect runs/glyphs --at step-400 --json\n"
    "  thermopile inspect runs/cc3m --data /mnt/elsewhere/cc3m"
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--at", default="latest", show_default=True, metavar="TAG|ID", help="The snapshot to look at.")
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Where the run's dataset is now, if it was moved.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def inspect(run: Path, at: str, data: Path | None, as_json: bool) -> None:
    """Show what the temperatures of RUN say, and write RUN/report/report.html.

    Works while the run trains: it reads the last snapshot of the state and changes nothing.
    """
    from ..trainer.run_directory import RunDirectory
    from .inspection import read_run
    from .report import write_report
    from .summary import to_json
    from .temperatures import measure

    inspection = read_run(RunDirectory(run), at=at, data=data)
    temperatures = measure(inspection)
    report = write_report(inspection, temperatures)
    if as_json:
        click.echo(json.dumps(to_json(inspection, temperatures, report), allow_nan=False))
        return
    _print_summary(inspection, temperatures)
    click.echo(report)


def _print_summary(inspection: Inspection, temperatures: Temperatures) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from .plain_text import plain_text
    from .summary import facts, table

    for word, value in facts(inspection):
        click.echo(f"{word:10}{plain_text(value, most=1000)}")
    for note in temperatures.notes:
        click.echo(f"{'note':10}{plain_text(note, most=1000)}")
    if inspection.state is None or not temperatures.sides:
        return
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("tau of the visited samples")
    for side in temperatures.sides:
        shown.add_column(side.label, justify="right")
    for row in table(temperatures, inspection.state):
        shown.add_row(row.label, *row.cells)
    Console(highlight=False).print(shown)
