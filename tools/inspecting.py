"""Inspect a run as `thermopile inspect` was asked to: a report, single samples, or rows. Imported when it runs."""

from __future__ import annotations

import json
import os
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..files import refuse_link
from ..trainer.errors import ConfigError, RunError
from ..trainer.run_directory import RunDirectory
from .inspection import summary
from .inspection.as_json import samples_to_json, to_json
from .inspection.findings import Findings, confirm_with_progress, look, read_again, survey_with_progress
from .inspection.predicted import other_dataset
from .inspection.rows_export import check_target, export_rows
from .inspection.run import Inspection
from .inspection.samples import Sample, read_histories
from .inspection.survey import Survey
from .plain_text import plain_text
from .progress import progress_bar, task_bars, working
from .report.page import history_table, write_report, write_samples
from .report.sheets import facts
from .terminal import print_facts, print_table

if TYPE_CHECKING:
    from ..trainer.encoders.averaging import Weights
    from .serving.answers import Answers
    from .serving.server import PageServer


def report(
    run: Path, at: str, against: str | None, by: tuple[str, ...], with_map: bool, suspects: int,
    weights: Weights | None, allow_code: bool, data: Path | None, to: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Print a summary and write the report, or print the findings as JSON."""
    folder = None if as_json else _writable(run, to)
    findings = look(
        run, at=at, against=against, by=by, with_map=with_map, suspects=suspects, weights=weights,
        allow_code=allow_code, data=data,
    )  # fmt: skip
    if folder is None:
        click.echo(json.dumps(to_json(findings), allow_nan=False))
        return
    with working("drawing the report"):
        path = write_report(findings, folder)
    _print_summary(findings)
    click.echo(path)


def _writable(run: Path, to: Path | None) -> Path:
    """Return the page's directory. Raises RunError if it is not writable: now rather than after minutes of work.

    Raises NotRegularFileError if RUN/report is a link.
    """
    folder = to or RunDirectory(run).report
    if to is None:
        refuse_link(folder)
    nearest = folder if folder.exists() else run
    if run.is_dir() and not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise RunError(f"the page cannot be written to {folder}; choose another directory with --to")
    return folder


def _print_summary(findings: Findings) -> None:
    survey = findings.survey
    said = [("warning", warning) for warning in findings.warnings] + [("note", note) for note in findings.notes]
    print_facts([*summary.facts(findings.inspection, survey), *said])
    if survey is None or survey.kinds is None or not survey.kinds.worth_showing:
        return
    if survey.sides:
        _print_tau(findings, survey)
    head, rows = summary.kinds_table(survey.kinds)
    print_table([head[0], *(f">{title}" for title in head[1:])], rows)
    if found := findings.confirmation:
        print_facts([("forward pass", summary.confirmation(found))])


def _print_tau(findings: Findings, survey: Survey) -> None:
    names = [f">{side.name}" for side in survey.sides]
    ends = ["lowest … highest", *(summary.sparkline(side.tau) for side in survey.sides)]
    rows = [*summary.table(findings.inspection, survey, summary.TERMINAL_QUANTILES), ends]
    print_table([summary.head(findings.inspection), *names], rows)
    if drift := findings.drift:
        print_table([f"from {drift.earlier.tag} to {drift.later.tag}", *names], summary.drift_table(drift))


def print_samples(
    run: Path, ids: tuple[int, ...], at: str, data: Path | None, to: Path | None, allow_code: bool, as_json: bool
) -> None:  # fmt: skip
    """Print single samples with their history and write their page, or print them as JSON."""

    def read(inspection: Inspection) -> tuple[Inspection, Survey | None, list[Sample]]:
        survey = survey_with_progress(inspection, ())
        return inspection, survey, read_histories(inspection, ids, survey.sides if survey else ())

    folder = None if as_json else _writable(run, to)
    inspection, survey, samples = read_again(read, run, at, data, allow_code=allow_code)
    if folder is None:
        click.echo(json.dumps(samples_to_json(inspection, samples), allow_nan=False))
        return
    path = write_samples(inspection, survey, samples, folder)
    print_facts([*summary.facts(inspection, survey), *(("note", note) for note in inspection.notes)])
    for sample in samples:
        click.echo()
        print_facts(facts(sample))
        if sample.history:
            head, rows = history_table(sample)
            titles = [head[0], *(f">{word}" for word in head[1:])]
            print_table(titles, [[cell if isinstance(cell, str) else cell.shown for cell in row] for row in rows])
    click.echo(path)


def export(
    run: Path, to: Path, at: str, data: Path | None, overwrite: bool, suspects: int, weights: Weights | None,
    allow_code: bool,
) -> None:  # fmt: skip
    """Write one row per sample to a file, with kinds confirmed by a forward pass if there are to be suspects."""

    def write(inspection: Inspection) -> tuple[Inspection, int]:
        samples, confirmation = inspection.reader.samples if inspection.reader else 0, None
        if suspects and (survey := survey_with_progress(inspection, (), suspects)):
            _, confirmation = confirm_with_progress(inspection, survey, suspects, weights, allow_code)
        with progress_bar("exporting", samples) as bar:
            export_rows(inspection, to, bar.update, confirmation)
        return inspection, samples

    check_target(to, overwrite=overwrite)
    inspection, samples = read_again(write, run, at, data, allow_code=allow_code)
    print_facts([("note", note) for note in inspection.notes])
    click.echo(f"{plain_text(str(to), most=1000)}: {samples:,} rows, {to.stat().st_size / 1e6:,.1f} MB")


def serve(run: Path, at: str, data: Path | None, to: Path | None, port: int) -> None:
    """Serve the page of all samples until Ctrl-C, after making its index."""
    from .serving.answers import Answers
    from .serving.catalogue import Catalogue, open_catalogue

    if other_dataset(RunDirectory(run), data, allow_code=False):
        raise ConfigError("--serve is for the dataset that the run was trained on; leave it out to see temperatures "
                          "predicted for another")  # fmt: skip
    folder = _writable(run, to)

    def opened(inspection: Inspection) -> tuple[Inspection, Catalogue]:
        with task_bars() as on_progress:
            return inspection, open_catalogue(inspection, folder, on_progress)

    inspection, catalogue = read_again(opened, run, at, data)
    with closing(catalogue), _listening(Answers(inspection, catalogue), port) as server:
        print_facts([("note", note) for note in inspection.notes])
        click.echo(f"{server.address}\nOnly this machine, and whoever has this address, can open the page. "
                   "Ctrl-C ends it.")  # fmt: skip
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _listening(answers: Answers, port: int) -> PageServer:
    from .serving.server import PageServer

    try:
        return PageServer(answers, port)
    except OSError as error:
        raise RunError(f"port {port} cannot be used: {error.strerror}; choose another one with --port") from error
