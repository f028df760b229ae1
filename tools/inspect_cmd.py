"""`thermopile inspect`: a run's temperatures in the terminal, as an HTML page, or as rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .plain_text import plain_text
from .terminal import print_facts, print_table

if TYPE_CHECKING:
    from .inspection.findings import Findings
    from .inspection.run import Inspection
    from .inspection.samples import Sample
    from .inspection.survey import Survey

LATEST = "latest"


@click.command(
    short_help="Summarise the temperatures of a run.",
    epilog="\b\nExamples:\n"
    "  thermopile inspect runs/cc3m\n"
    "  thermopile inspect runs/cc3m --at step-12000 --against step-4000\n"
    "  thermopile inspect runs/cc3m --by folder --map\n"
    "  thermopile inspect runs/cc3m --sample 1204 77\n"
    "  thermopile inspect runs/cc3m --export rows.parquet",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("more_ids", type=click.IntRange(min=0), nargs=-1, metavar="[MORE IDS]...")
@click.option("--at", default=LATEST, show_default=True, metavar="TAG|ID", help="The snapshot to inspect.")
@click.option(
    "--against", metavar="TAG|ID", help="Compare with this snapshot: how far tau moved, and for which samples most."
)
@click.option("--by", multiple=True, default=("group",), metavar="COLUMN", show_default="group, the class",
              help="Group by a column of the samples table, or by `folder`. Repeatable.")  # fmt: skip
@click.option("--map", "with_map", is_flag=True, help="Add a t-SNE map of the encoders' embeddings.")
@click.option("--sample", "ids", type=click.IntRange(min=0), multiple=True, metavar="ID [ID…]",
              help="Show everything about these samples instead; RUN comes first.")  # fmt: skip
@click.option("--export", "rows_file", type=click.Path(path_type=Path), metavar="FILE.parquet|csv",
              help="Write one row per sample instead.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Let --export replace an existing file.")
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="New path of the run's dataset, if it was moved.")  # fmt: skip
@click.option("--to", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIRECTORY",
              help="Directory of the page. Default: RUN/report.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object and write no file.")
@click.pass_context
def inspect(
    context: click.Context, run: Path, more_ids: tuple[int, ...], ids: tuple[int, ...], rows_file: Path | None, at: str,
    against: str | None, by: tuple[str, ...], with_map: bool, overwrite: bool, data: Path | None, to: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Summarise the temperatures of RUN and write RUN/report/report.html; with --json, only print.

    Works while the run trains: reads the latest snapshot and changes nothing else. Needs no GPU.
    """
    if more_ids and not ids:
        raise click.UsageError(f"unexpected argument {more_ids[0]}; sample ids come after --sample")
    if as_json:
        _refuse(context, "--json", "to")
    if rows_file:
        _refuse(context, "--export", "ids", "against", "by", "with_map", "to", "as_json")
        _export(run, rows_file, at, data, overwrite)
    elif ids:
        _refuse(context, "--sample", "against", "by", "with_map", "overwrite")
        _print_samples(run, (*ids, *more_ids), at, data, to, as_json)
    else:
        _refuse(context, "a report", "overwrite")
        _report(run, at, against, tuple(dict.fromkeys(by)), with_map, data, to, as_json)


def _refuse(context: click.Context, what: str, *names: str) -> None:
    """Refuse options that would have no effect."""
    given = {name for name in names if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    if extra := [option.opts[0] for option in context.command.params if option.name in given]:
        raise click.UsageError(f"{', '.join(extra)} has no effect with {what}; leave out one of them")


def _report(
    run: Path, at: str, against: str | None, by: tuple[str, ...], with_map: bool, data: Path | None, to: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    from .inspection.as_json import to_json
    from .inspection.findings import look
    from .progress import working
    from .report.page import write_report

    folder = None if as_json else _writable(run, to)
    findings = look(run, at=at, against=against, by=by, with_map=with_map, data=data)
    if folder is None:
        click.echo(json.dumps(to_json(findings), allow_nan=False))
        return
    with working("drawing the report"):
        report = write_report(findings, folder)
    _print_summary(findings)
    click.echo(report)


def _writable(run: Path, to: Path | None) -> Path:
    """Return the page's directory. Raises RunError if it is not writable: now rather than after minutes of work.

    Raises NotRegularFileError if RUN/report is a link.
    """
    from ..files import refuse_link
    from ..trainer.errors import RunError
    from ..trainer.run_directory import RunDirectory

    folder = to or RunDirectory(run).report
    if to is None:
        refuse_link(folder)
    nearest = folder if folder.exists() else run
    if run.is_dir() and not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise RunError(f"the page cannot be written to {folder}; choose another directory with --to")
    return folder


def _print_summary(findings: Findings) -> None:
    from .inspection.summary import TERMINAL_QUANTILES, drift_table, facts, sparkline, table

    survey = findings.survey
    said = [("warning", warning) for warning in findings.warnings] + [("note", note) for note in findings.notes]
    print_facts([*facts(findings.inspection, survey), *said])
    if survey is None or not survey.sides:
        return
    names = [f">{side.name}" for side in survey.sides]
    ends = ["lowest … highest", *(sparkline(side.tau) for side in survey.sides)]
    rows = [*table(findings.inspection, survey, TERMINAL_QUANTILES), ends]
    print_table(["tau of the visited samples", *names], rows)
    if drift := findings.drift:
        print_table([f"from {drift.earlier.tag} to {drift.later.tag}", *names], drift_table(drift))


def _print_samples(run: Path, ids: tuple[int, ...], at: str, data: Path | None, to: Path | None, as_json: bool) -> None:
    from .inspection.as_json import samples_to_json
    from .inspection.findings import read_again, survey_with_progress
    from .inspection.samples import read_histories
    from .inspection.summary import facts
    from .report import page, sheets

    def read(inspection: Inspection) -> tuple[Inspection, Survey | None, list[Sample]]:
        survey = survey_with_progress(inspection, ())
        return inspection, survey, read_histories(inspection, ids, survey.sides if survey else ())

    folder = None if as_json else _writable(run, to)
    inspection, survey, samples = read_again(read, run, at, data)
    if folder is None:
        click.echo(json.dumps(samples_to_json(inspection, samples), allow_nan=False))
        return
    path = page.write_samples(inspection, survey, samples, folder)
    print_facts([*facts(inspection, survey), *(("note", note) for note in inspection.notes)])
    for sample in samples:
        click.echo()
        print_facts(sheets.facts(sample))
        if sample.history:
            head, rows = page.history_table(sample)
            titles = [head[0], *(f">{word}" for word in head[1:])]
            print_table(titles, [[cell if isinstance(cell, str) else cell.shown for cell in row] for row in rows])
    click.echo(path)


def _export(run: Path, to: Path, at: str, data: Path | None, overwrite: bool) -> None:
    from .inspection.findings import read_again
    from .inspection.rows_export import check_target, export_rows
    from .progress import progress_bar

    def write(inspection: Inspection) -> tuple[Inspection, int]:
        samples = inspection.reader.samples if inspection.reader else 0
        with progress_bar("exporting", samples) as bar:
            export_rows(inspection, to, bar.update)
        return inspection, samples

    check_target(to, overwrite=overwrite)
    inspection, samples = read_again(write, run, at, data)
    print_facts([("note", note) for note in inspection.notes])
    click.echo(f"{plain_text(str(to), most=1000)}: {samples:,} rows, {to.stat().st_size / 1e6:,.1f} MB")
