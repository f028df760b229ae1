"""`thermopile inspect`: what the temperatures of a run say, in the terminal, as a page, and as rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .plain_text import plain_text
from .terminal import print_facts, print_table

if TYPE_CHECKING:
    from .inspection.findings import Findings

LATEST = "latest"
TRIES = 3
"""A run that keeps few snapshots may delete the one that is being read; the next latest one is as good."""


@click.command(
    short_help="Show what the temperatures of a run say.",
    epilog="\b\nExamples:\n"
    "  thermopile inspect runs/cc3m\n"
    "  thermopile inspect runs/cc3m --at step-12000 --against step-4000\n"
    "  thermopile inspect runs/cc3m --by folder --map\n"
    "  thermopile inspect runs/cc3m --sample 1204 77\n"
    "  thermopile inspect runs/cc3m --export rows.parquet",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("more_ids", type=click.IntRange(min=0), nargs=-1, metavar="")
@click.option("--at", default=LATEST, show_default=True, metavar="TAG|ID", help="The snapshot to look at.")
@click.option("--against", metavar="TAG|ID", help="Another snapshot: what has moved between the two, and the most.")
@click.option("--by", multiple=True, default=("group",), metavar="COLUMN", show_default="group, the class",
              help="Group by a column of the samples table, or by `folder`. May be repeated.")  # fmt: skip
@click.option("--map", "with_map", is_flag=True, help="Add a t-SNE map of the encoders' embeddings.")
@click.option("--sample", "ids", type=click.IntRange(min=0), multiple=True, metavar="ID [ID…]",
              help="Show everything about these samples instead.")  # fmt: skip
@click.option("--export", "to", type=click.Path(path_type=Path), metavar="FILE.parquet|csv",
              help="Write a row for every sample instead.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Let --export replace the file where there is one.")
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Where the run's dataset is now, if it was moved.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
def inspect(
    run: Path, more_ids: tuple[int, ...], ids: tuple[int, ...], to: Path | None, at: str, against: str | None,
    by: tuple[str, ...], with_map: bool, overwrite: bool, data: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show what the temperatures of RUN say, and write RUN/report/report.html.

    Works while the run trains: it reads the last snapshot of the state and changes nothing. Needs no GPU.
    """
    if more_ids and not ids:
        raise click.UsageError(f"{more_ids[0]} is one argument too many; ids of samples come after --sample")
    if ids and to:
        raise click.UsageError("--sample shows a few samples and --export writes all; give one of the two")
    if to:
        _export(run, to, at, data, overwrite)
    elif ids:
        _print_samples(run, (*ids, *more_ids), at, data, as_json)
    else:
        _report(run, at, against, tuple(dict.fromkeys(by)), with_map, data, as_json)


def _report(
    run: Path, at: str, against: str | None, by: tuple[str, ...], with_map: bool, data: Path | None, as_json: bool
) -> None:
    from ..state_store import SnapshotNotFoundError
    from .inspection.looking import look
    from .inspection.summary import to_json
    from .progress import working
    from .report.page import write_report

    for tries_left in reversed(range(TRIES)):
        try:
            findings = look(run, at=at, against=against, by=by, with_map=with_map, data=data)
            with working("drawing the report"):
                report = write_report(findings)
            break
        except SnapshotNotFoundError:
            if at != LATEST or against or not tries_left:
                raise
    if as_json:
        click.echo(json.dumps(to_json(findings, report), allow_nan=False))
    else:
        _print_summary(findings)
        click.echo(report)


def _print_summary(findings: Findings) -> None:
    from .inspection.summary import facts, sparkline, table

    survey = findings.survey
    said = [("warning", warning) for warning in findings.warnings] + [("note", note) for note in findings.notes]
    print_facts([*facts(findings.inspection, survey), *said])
    if survey is None or not survey.sides:
        return
    rows = [[row.label, *row.cells] for row in table(findings.inspection, survey)]
    rows.append(["lowest … highest", *(sparkline(side.tau) for side in survey.sides)])
    print_table(["tau of the visited samples", *(f">{side.label}" for side in survey.sides)], rows)


def _print_samples(run: Path, ids: tuple[int, ...], at: str, data: Path | None, as_json: bool) -> None:
    from ..trainer.run_directory import RunDirectory
    from .inspection.details import read_details
    from .inspection.history import read_histories
    from .inspection.looking import survey_with_progress
    from .inspection.run import read_run
    from .inspection.summary import samples_to_json
    from .report.samples_page import history_table, ranks, write_samples
    from .report.sheets import facts

    inspection = read_run(RunDirectory(run), at=at, data=data)
    survey = survey_with_progress(inspection, ())
    notes = survey.notes if survey else inspection.notes
    histories = read_histories(inspection, ids, notes, survey.sides if survey else ())
    details = read_details(inspection, ids)
    report = write_samples(inspection, details, histories, notes)
    if as_json:
        click.echo(json.dumps(samples_to_json(details, histories, notes, report), allow_nan=False))
        return
    for history in histories:
        print_facts([*facts(details[history.sample_id]), *ranks(inspection, history)])
        if history.states:
            head, rows = history_table(history)
            titles = [head[0], *(f">{word}" for word in head[1:])]
            print_table(titles, [[cell if isinstance(cell, str) else cell.shown for cell in row] for row in rows])
    print_facts([("note", note) for note in notes])
    click.echo(report)


def _export(run: Path, to: Path, at: str, data: Path | None, overwrite: bool) -> None:
    from ..trainer.run_directory import RunDirectory
    from .inspection.rows_export import check_target, export_rows
    from .inspection.run import read_run
    from .progress import progress_bar

    check_target(to, overwrite=overwrite)
    inspection = read_run(RunDirectory(run), at=at, data=data)
    samples = inspection.reader.samples if inspection.reader else 0
    with progress_bar("exporting", samples) as bar:
        export_rows(inspection, to, bar.update)
    print_facts([("note", note) for note in inspection.notes])
    click.echo(f"{plain_text(str(to), most=1000)}: {samples:,} rows, {to.stat().st_size / 1e6:,.1f} MB")
