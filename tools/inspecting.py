"""Inspect a run as `thermopile inspect` was asked to: a report, single samples, or rows. Imported when it runs."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..storage.files import refuse_link
from ..storage.place import Place
from ..trainer.errors import RunError
from ..trainer.run_directory import RunDirectory
from .inspection import summary
from .inspection.as_json import duplicates_to_json, samples_to_json, to_json
from .inspection.duplicates.finding import DUPLICATES, find_duplicates, write_duplicates
from .inspection.duplicates.representatives import read_scores
from .inspection.features.features_file import NAME, FeaturesFile
from .inspection.features.neighbours import ANCHORS, Neighbours, find_neighbours
from .inspection.features.run_features import features_with_progress, open_features
from .inspection.findings import (
    ROWS_IN_TWO_SECONDS,
    Findings,
    confirm_with_progress,
    look,
    read_again,
    survey_with_progress,
)
from .inspection.reading.opening import Inspection
from .inspection.reading.predicted import refuse_other_dataset
from .inspection.rows_export import check_target, export_rows
from .inspection.temperatures.kinds import KIND_NAMES, MISFIT
from .inspection.temperatures.samples import Sample, read_histories, read_samples
from .inspection.temperatures.survey import Survey
from .inspection.temperatures.whole_run import PRECISION
from .plain_text import plain_text
from .progress import progress_bar, task_bars, working
from .report.duplicates import duplicate_facts, write_duplicates_page
from .report.neighbourhood import listed_ids, listings, table_of
from .report.page import write_report, write_samples
from .report.sheets import facts, number, state_word
from .terminal import print_facts, print_table

if TYPE_CHECKING:
    from ..trainer.encoders.averaging import Weights
    from .serving.answers import Answers
    from .serving.server import PageServer


def report(
    run: Place, at: str, against: str | None, by: tuple[str, ...], with_map: bool, suspects: int,
    weights: Weights | None, allow_code: bool, data: Place | None, to: Path | None, as_json: bool,
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


def _writable(run: Place, to: Path | None) -> Path:
    """Return the page's directory. Raises RunError if it is not writable: now rather than after minutes of work.

    Raises NotRegularFileError if RUN/report is a link.
    """
    folder = to or RunDirectory(run).report
    if to is None:
        refuse_link(folder)
    here = RunDirectory(run).report.parent
    nearest = folder if folder.exists() else here
    if here.is_dir() and not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise RunError(f"the page cannot be written to {folder}; choose another directory with --to")
    return folder


def _print_summary(findings: Findings) -> None:
    survey = findings.survey
    said = [("warning", warning) for warning in findings.warnings] + [("note", note) for note in findings.notes]
    print_facts([*(("coldest", first) for first in findings.said_first),
                 *summary.facts(findings.inspection, survey), *said])  # fmt: skip
    if survey is None:
        return
    if survey.sides:
        _print_tau(findings, survey)
    if survey.kinds is None or not survey.kinds.worth_showing:
        return
    head, rows = summary.kinds_table(survey.kinds)
    print_table([head[0], *(f">{title}" for title in head[1:])], rows)
    if survey.kinds.counts.get(KIND_NAMES[MISFIT]):
        print_facts([("misfits", PRECISION)])
    if survey.doubted:
        print_facts([("doubted", summary.came_back(survey.doubted))])
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
    run: Place, ids: tuple[int, ...], at: str, data: Place | None, to: Path | None, as_json: bool,
    neighbours: int | None = None, weights: Weights | None = None, allow_code: bool = False,
) -> None:  # fmt: skip
    """Print single samples with their history and write their page, or print them as JSON.

    neighbours: how many neighbours and negatives of each to list.
    """

    def read(inspection: Inspection) -> tuple[Inspection, Survey | None, list[Sample]]:
        survey = survey_with_progress(inspection, ())
        return inspection, survey, read_histories(inspection, ids, survey)

    if neighbours:
        refuse_other_dataset("--neighbours", RunDirectory(run), data)
    folder = None if as_json and not neighbours else _writable(run, to)
    inspection, survey, samples = read_again(read, run, at, data, allow_code=allow_code)
    around: dict[int, Neighbours] = {}
    if folder and neighbours:
        around = _around(inspection, samples, folder, neighbours, weights, allow_code)
    if folder is None or as_json:
        click.echo(json.dumps(samples_to_json(inspection, samples, around), allow_nan=False))
        return
    # Without the state: a run that trains may have deleted the snapshot while features were made.
    listed = read_samples(replace(inspection, reader=None), listed_ids(around.values()))
    path = write_samples(inspection, survey, samples, folder, around, listed)
    print_facts([*summary.facts(inspection, survey), *(("note", note) for note in inspection.notes)])
    for sample in samples:
        click.echo()
        print_facts(facts(sample))
        if sample.history:
            titles = ["snapshot", *(f">{state_word(column)}" for column in sample.history[0].values)]
            print_table(titles, [[at.snapshot.tag, *map(number, at.values.values())] for at in sample.history])
        if found := around.get(sample.sample_id):
            for listing in listings(sample, found):
                click.echo(f"{listing.title}. {listing.words}".rstrip())
                print_table(*table_of(listing, listed))
    click.echo(path)


def _around(
    inspection: Inspection, samples: list[Sample], folder: Path, count: int, weights: Weights | None, allow_code: bool
) -> dict[int, Neighbours]:
    """Return the neighbours of samples by id. Makes the features of all samples first where `folder` has none."""
    folder.mkdir(exist_ok=True)
    features = features_with_progress(inspection, folder, weights, allow_code)
    found = {}
    with progress_bar("comparing", len(samples), hidden=len(samples) * features.samples < ROWS_IN_TWO_SECONDS) as bar:
        for done, sample in enumerate(samples, start=1):
            tau = {side: sample.state.get(f"{side}/tau") for side in inspection.sides or ANCHORS[features.sides]}
            found[sample.sample_id] = find_neighbours(features, sample.sample_id, count, tau)
            bar.update(done)
    return found


def report_duplicates(
    run: Place, at: str, weights: Weights | None, allow_code: bool, data: Place | None, to: Path | None, as_json: bool
) -> None:
    """Look for duplicates, write them as rows, and print a summary and write a page, or print JSON."""
    refuse_other_dataset("--duplicates", RunDirectory(run), data)
    folder = _writable(run, to)
    inspection, score = read_again(read_scores, run, at, data)
    if (dataset := inspection.dataset) is None:
        raise RunError(f"duplicates need the run's dataset. {' '.join(inspection.notes)}")
    folder.mkdir(exist_ok=True)
    features = features_with_progress(inspection, folder, weights, allow_code)
    with task_bars() as show:
        found = find_duplicates(dataset, features, score, folder, show)
    rows = folder / DUPLICATES
    write_duplicates(rows, found, dataset.index.fingerprint)
    if as_json:
        click.echo(json.dumps(duplicates_to_json(inspection, found, rows), allow_nan=False))
        return
    page = write_duplicates_page(inspection, dataset, found, folder)
    print_facts([*summary.facts(inspection, None), *duplicate_facts(found),
                 *(("note", note) for note in inspection.notes)])  # fmt: skip
    click.echo(rows)
    click.echo(page)


def write_rows(
    run: Place, to: Path, at: str, data: Place | None, overwrite: bool, suspects: int, weights: Weights | None,
    allow_code: bool,
) -> None:  # fmt: skip
    """Write one row per sample to a file, with kinds confirmed by a forward pass if there are to be suspects."""

    def write(inspection: Inspection) -> tuple[Inspection, int]:
        samples, confirmation = inspection.reader.samples if inspection.reader else 0, None
        if suspects and (survey := survey_with_progress(inspection, (), suspects, over_run=True)):
            _, confirmation = confirm_with_progress(inspection, survey, suspects, weights, allow_code)
        with progress_bar("exporting", samples) as bar:
            export_rows(inspection, to, bar.update, confirmation)
        return inspection, samples

    check_target(to, overwrite=overwrite)
    inspection, samples = read_again(write, run, at, data, allow_code=allow_code)
    print_facts([("note", note) for note in inspection.notes])
    click.echo(f"{plain_text(str(to), most=1000)}: {samples:,} rows, {to.stat().st_size / 1e6:,.1f} MB")


def serve(
    run: Place, at: str, data: Place | None, to: Path | None, port: int, neighbours: int | None,
    weights: Weights | None, allow_code: bool,
) -> None:  # fmt: skip
    """Serve the page of all samples until Ctrl-C, after making its index.

    neighbours: length of each list of a sample's neighbours, for which the features of all samples are made first;
    None: show neighbours only if the features are there.
    """
    from .serving.answers import NEIGHBOURS, Answers
    from .serving.catalogue import Catalogue, open_catalogue, with_margins

    refuse_other_dataset("--serve", RunDirectory(run), data)
    folder = _writable(run, to)

    def opened(inspection: Inspection) -> tuple[Inspection, Catalogue]:
        with task_bars() as on_progress:
            return inspection, open_catalogue(inspection, folder, on_progress)

    inspection, catalogue = read_again(opened, run, at, data)
    with closing(catalogue):
        features = (features_with_progress(inspection, folder, weights, allow_code) if neighbours
                    else _features_there(inspection, folder))  # fmt: skip
        if features and features.sides == 2:
            with task_bars() as on_progress:
                catalogue = with_margins(catalogue, features, folder, on_progress)
        with _listening(Answers(inspection, catalogue, features, neighbours or NEIGHBOURS), port) as server:
            print_facts([("note", note) for note in inspection.notes])
            try:
                click.echo(f"{server.address}\nOnly this machine, and whoever has this address, can open the page. "
                           "Ctrl-C ends it.")  # fmt: skip
                server.serve_forever()
            except KeyboardInterrupt:
                os._exit(0)  # leaving otherwise waits for threads that are computing or inside SQLite


def _features_there(inspection: Inspection, folder: Path) -> FeaturesFile | None:
    """Open the features of all samples if `folder` has them. Others are noted; a link raises NotRegularFileError."""
    if not (folder / NAME).exists():
        return None
    try:
        return open_features(inspection, folder)
    except RunError as error:
        inspection.notes.append(f"No neighbours are shown: {error}. --neighbours makes the features again.")
    return None


def _listening(answers: Answers, port: int) -> PageServer:
    from .serving.server import PageServer

    try:
        return PageServer(answers, port)
    except OSError as error:
        raise RunError(f"port {port} cannot be used: {error.strerror}; choose another one with --port") from error
