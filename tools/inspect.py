"""A run's temperatures in the terminal, as an HTML page, as rows, or served to a browser: the modes of `inspect`."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter

from ..pipeline.opening import Dataset
from ..storage.files import may_make, refuse_link
from ..storage.place import AnyPlace, Place, Places, place_of
from ..trainer.config import Weights
from ..trainer.errors import RunError
from ..trainer.run_directory import RunDirectory, refuse_in_run
from .inspection import summary
from .inspection.as_json import duplicates_to_json, samples_to_json, to_json
from .inspection.duplicates.finding import DUPLICATES, find_duplicates, write_duplicates
from .inspection.feature_findings.by_features import by_features, json_quantiles
from .inspection.features.confirmation import confirm
from .inspection.features.features_file import NAME, FeaturesFile
from .inspection.features.neighbours import ANCHORS, Neighbours, find_neighbours
from .inspection.features.run_features import DEFAULT, DRAWN, Asked, run_features, wanted_features
from .inspection.features.solving import SolvedTemperatures, solve_other
from .inspection.findings import Findings, look, read_again
from .inspection.opening import LATEST, Inspection
from .inspection.rows_export import check_target, export_rows, export_solved
from .inspection.temperatures.kinds import KindRules
from .inspection.temperatures.misfits import exported, misfits, read_scores
from .inspection.temperatures.samples import InspectedSample, read_histories, read_samples
from .inspection.temperatures.survey import Survey, survey
from .printing import plain_text, print_facts, print_table
from .progress import in_units, task_bars, working
from .report.page import duplicate_facts, write_duplicates_page, write_report, write_samples
from .report.sheets import facts, listed_ids, listings, number, state_word, table_of

_OF_REPORT = ("against", "by", "with_map", "suspects", "rho", "features", "to", "as_json")
"""Options that have an effect on a report, besides those of all modes."""


@dataclass(frozen=True)
class InspectOptions:
    """The options of `thermopile inspect`."""

    run: Place
    ids: tuple[int, ...]
    neighbours: int | None
    duplicates: bool
    rows_file: Path | None
    serves: bool
    port: int
    at: str
    against: str | None
    by: tuple[str, ...]
    with_map: bool
    suspects: int
    rho: float | None
    features: int | None
    weights: Weights | None
    overwrite: bool
    data: Places | None
    to: Path | None
    allow_code: bool
    as_json: bool

    @property
    def encoders(self) -> Asked:
        """Which features to make, and by which encoders."""
        return Asked(self.features, self.weights, self.allow_code)

    @property
    def mode(self) -> str:
        """The mode; a key of MODES."""
        return next((mode for mode, (_, options) in MODES.items() if getattr(self, options[0])), "a report")

    @property
    def used(self) -> set[str]:
        """The names of the options that have an effect in the mode."""
        used = {"run", "more_ids", "at", "data", *MODES[self.mode][1]}
        if self.mode == "a report" or self.suspects or self.neighbours or self.duplicates or self.features:
            used |= {"weights", "allow_code"}
        if self.as_json and not (self.neighbours or self.duplicates):
            used -= {"to"}
        return used


def inspect(
    run: AnyPlace,
    *,
    at: str = LATEST,
    against: str | None = None,
    by: Sequence[str] = ("group",),
    with_map: bool = False,
    suspects: int = 0,
    rho: float | None = None,
    features: int | None = None,
    weights: Weights | None = None,
    data: Places | None = None,
    to: str | os.PathLike[str] | None = None,
    allow_code: bool = False,
    write: bool = True,
) -> Findings:
    """Inspect a run as `thermopile inspect` does, with progress, and write its page, which a notebook shows.

    suspects: how many samples to confirm by a forward pass. features: how many samples' to make at most; None: as many
    as a minute allows. to: the page's directory; None: RUN/report. write: whether to write the page.
    Raises RunError, StateStoreError, DatasetError, ConfigError, OSError.

        >>> findings = thermopile.inspect("runs/mine")
        >>> str(findings.page), findings.survey.samples
        ('runs/mine/report/report.html', 72)
    """
    place = place_of(run)
    folder = _writable(place, None if to is None else Path(to)) if write else None
    with task_bars() as show:
        asked = Asked(features, weights, allow_code)
        of: dict[str, Any] = {"against": against, "by": by, "with_map": with_map, "suspects": suspects, "rho": rho}
        findings = look(place, at=at, **of, asked=asked, folder=folder, data=data, on_progress=show)
    if folder is None:
        return findings
    with working("drawing the report"):
        return replace(findings, page=write_report(findings, folder, at=at))


def report(asked: InspectOptions) -> None:
    """Print a summary and write the report, or print the findings as JSON."""
    names = [*_OF_REPORT, "at", "data", "weights", "allow_code"]
    options = {name: getattr(asked, name) for name in names if name != "as_json"}
    findings = inspect(asked.run, **options, write=not asked.as_json)
    if asked.as_json:
        click.echo(json.dumps(to_json(findings), allow_nan=False))
        return
    _print_summary(findings)
    click.echo(findings.page)


def _writable(run: Place, to: Path | None) -> Path:
    """Return the page's directory. Raises RunError if it is not writable: now rather than after minutes of work.

    Raises NotRegularFileError if RUN/report is a link, ConfigError for a run's other folders.
    """
    folder = to or RunDirectory(run).report
    refuse_link(folder) if to is None else refuse_in_run(place_of(folder), is_file=True)
    if RunDirectory(run).report.parent.is_dir() and not may_make(folder):
        raise RunError(f"the page cannot be written to {folder}; choose another directory with --to")
    return folder


def _print_summary(findings: Findings) -> None:
    survey = findings.survey
    found = [("" if place else "found", first) for place, first in enumerate(findings.first_sentences)]
    warnings = [("warning", warning) for warning in findings.warnings]
    print_facts([*found, *summary.facts(findings.inspection, survey), *warnings], findings.notes)
    if survey is None:
        return
    if survey.sides:
        names = [side.name for side in survey.sides]
        ends = ["lowest … highest", *(summary.sparkline(side.tau) for side in survey.sides)]
        rows = [*summary.table(findings.inspection, survey, summary.TERMINAL_QUANTILES), ends]
        _print_figures([summary.HEAD, *names], rows)
        if drift := findings.drift:
            _print_figures([f"from {drift.earlier.tag} to {drift.later.tag}", *names], summary.drift_table(drift))
    if survey.parts and survey.sides:
        means = survey.parts.means()
        rows = [[of["part"], f"{of['samples']:,}", *map(summary.tau, of["mean_tau"].values())] for of in means]
        _print_figures(["part", "samples", *(f"mean tau ({side})" for side in survey.parts.tau)], rows)
    if by_features := findings.by_features:
        _print_figures(*summary.solved_table(by_features))
        for side, of_side in by_features.associations.items():
            head, rows = summary.associations_table(of_side)
            _print_figures([head[0] if side == "sample" else f"{side}: {head[0]}", *head[1:]], rows)
    kinds = survey.kinds if survey.kinds and survey.kinds.worth_showing else None
    if kinds or by_features:
        _print_figures(*summary.kinds_table(kinds, by_features.kinds if by_features else None))
    if kinds is None:
        return
    print_facts([("" if place else "misfits", sentence) for place, sentence in enumerate(findings.of_misfits)])
    if survey.doubted:
        print_facts([("doubted", summary.came_back(survey.doubted))])
    if confirmation := findings.confirmation:
        print_facts([("forward pass", summary.confirmation(confirmation))])


def _print_figures(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_table([head[0], *(f">{title}" for title in head[1:])], rows)


def print_samples(asked: InspectOptions) -> None:
    """Print single samples with their history and write their page, or print them as JSON."""

    def read(inspection: Inspection) -> tuple[Inspection, Survey | None, list[InspectedSample]]:
        with task_bars() as show:
            found = survey(inspection, (), show)
        return inspection, found, read_histories(inspection, asked.ids, found)

    folder = None if asked.as_json and not asked.neighbours else _writable(asked.run, asked.to)
    inspection, surveyed, samples = read_again(read, asked.run, asked.at, asked.data)
    around: dict[int, Neighbours] = {}
    if folder and asked.neighbours:
        features = _features(inspection, folder, asked)
        with task_bars() as show:
            for done, sample in enumerate(samples, start=1):
                tau = {side: sample.state.get(f"{side}/tau") for side in inspection.sides or ANCHORS[features.sides]}
                around[sample.sample_id] = find_neighbours(features, sample.sample_id, asked.neighbours, tau)
                show("comparing", done, len(samples))
    if folder is None or asked.as_json:
        click.echo(json.dumps(samples_to_json(inspection, samples, around), allow_nan=False))
        return
    # Without the state: a run that trains may have deleted the snapshot while features were made.
    listed = read_samples(replace(inspection, reader=None), listed_ids(around.values()))
    path = write_samples(inspection, surveyed, samples, folder, around, listed)
    print_facts(summary.facts(inspection, surveyed), inspection.notes)
    for sample in samples:
        click.echo()
        print_facts(facts(sample))
        if sample.history:
            titles = ["snapshot", *(f">{state_word(column)}" for column in sample.history[0].values)]
            print_table(titles, [[past.snapshot.tag, *map(number, past.values.values())] for past in sample.history])
        if found := around.get(sample.sample_id):
            for listing in listings(sample, found):
                click.echo(f"{listing.title}. {listing.words}".rstrip())
                print_table(*table_of(listing, listed))
    click.echo(path)


def _features(inspection: Inspection, folder: Path, asked: InspectOptions) -> FeaturesFile:
    """Return the features of all samples. Makes them first where `folder` has none."""
    folder.mkdir(parents=True, exist_ok=True)
    with task_bars() as show:
        return run_features(inspection, folder, asked.encoders, partial(show, "features"))


def report_duplicates(asked: InspectOptions) -> None:
    """Look for duplicates, write them as rows, and print a summary and write a page, or print JSON."""
    folder = _writable(asked.run, asked.to)
    inspection, score = read_again(read_scores, asked.run, asked.at, asked.data)
    if (dataset := inspection.dataset) is None:
        raise RunError(f"duplicates need the run's dataset. {' '.join(inspection.notes)}")
    features = _features(inspection, folder, asked)
    with task_bars() as show:
        found = find_duplicates(dataset, features, score, folder, show)
    rows = folder / DUPLICATES
    write_duplicates(rows, found, dataset.index.fingerprint)
    if asked.as_json:
        click.echo(json.dumps(duplicates_to_json(inspection, found, rows), allow_nan=False))
        return
    page = write_duplicates_page(inspection, dataset, found, folder)
    print_facts([*summary.facts(inspection, None), *duplicate_facts(found)], inspection.notes)
    click.echo(rows)
    click.echo(page)


def write_rows(asked: InspectOptions) -> None:
    """Write one row per sample to a file, with kinds confirmed by a forward pass if there are to be suspects."""
    to = asked.rows_file
    assert to is not None

    def write(inspection: Inspection) -> tuple[Inspection, int]:
        samples = inspection.reader.samples if inspection.reader else 0
        confirmation = of_features = more = None
        are_kept = any((inspection.run.report / name).exists() for name in (NAME, DRAWN))
        needed = asked.suspects or asked.features or asked.rho or are_kept  # else two passes over all rows for nothing
        with task_bars() as show:
            suspects = asked.suspects
            if needed and (found := survey(inspection, (), show, suspects=suspects, over_run=suspects > 0)):
                if suspects and found.kinds:
                    confirmation = confirm(inspection, found, partial(show, "confirming kinds"), asked.encoders)
                of = asked.encoders._replace(samples=asked.features or 0)
                of_features = by_features(inspection, found, inspection.run.report, of, asked.rho, show)
            if samples and (rules := KindRules.of(inspection)).log_s and not rules.why_none:
                more = exported(*misfits(inspection, show)[:2], inspection, samples)
            export_rows(inspection, to, partial(show, "exporting"), confirmation, of_features, more)
        return inspection, samples

    check_target(to, overwrite=asked.overwrite)
    inspection, samples = read_again(write, asked.run, asked.at, asked.data)
    print_facts([], inspection.notes)
    size = place_of(to).size_below() or to.stat().st_size
    click.echo(f"{plain_text(str(to), most=1000)}: {samples:,} rows, {in_units(size)}")


def solve_other_dataset(asked: InspectOptions, dataset: Dataset) -> None:
    """Print temperatures solved for samples that the run was not trained on, or write them as rows."""
    with task_bars() as show:
        run = RunDirectory(asked.run)
        found = solve_other(run, dataset, asked.at, asked.encoders, asked.rho, partial(show, "features"))
    note = f"The run was not trained on {dataset.absolute}: its temperatures are solved from features, not learned."
    tau = {side: solved.tau for side, solved in found.sides.items()}
    if asked.as_json:
        about = TypeAdapter(SolvedTemperatures).dump_python(found, mode="json", by_alias=True)
        quantiles = {side: json_quantiles(of_side) for side, of_side in tau.items()}
        places = {"run": str(run.path.resolve()), "dataset": dataset.absolute}
        click.echo(json.dumps({**places, "solved": about, "tau": quantiles, "notes": [note]}, allow_nan=False))
        return
    if asked.rows_file:
        export_solved(found, dataset, asked.rows_file)
    print_facts([("checkpoint", f"{found.checkpoint}, {found.weights} weights")], [note])
    number = f"{len(found.sample_ids):,} of {dataset.n:,} samples"
    _print_figures([f"tau where KL is rho = {found.rho:g}, of {number}", *tau], summary.solved_quantiles(tau))


def serve(asked: InspectOptions) -> None:
    """Serve the page of all samples until Ctrl-C, after making its index.

    Without --neighbours, a sample's neighbours are shown only if the features of all samples are there already.
    """
    from .serving.answers import NEIGHBOURS, Answers
    from .serving.catalogue import Catalogue, open_catalogue, with_margins
    from .serving.server import PageServer

    folder = _writable(asked.run, asked.to)

    def opened(inspection: Inspection) -> tuple[Inspection, Catalogue]:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with task_bars() as on_progress:
            return inspection, open_catalogue(inspection, folder, on_progress)

    inspection, catalogue = read_again(opened, asked.run, asked.at, asked.data)
    with closing(catalogue):
        features = None
        if asked.neighbours:
            features = _features(inspection, folder, asked)
        elif (folder / NAME).exists():
            try:
                features = FeaturesFile(folder / NAME, wanted_features(inspection, DEFAULT)[2])
            except RunError as error:
                inspection.notes.append(f"No neighbours are shown: {error}. --neighbours makes the features again.")
        if features and features.sides == 2:
            with task_bars() as on_progress:
                catalogue = with_margins(catalogue, features, folder, on_progress)
        answers = Answers(inspection, catalogue, features, asked.neighbours or NEIGHBOURS)
        try:
            server = PageServer(answers, asked.port)
        except OSError as error:
            why = f"port {asked.port} cannot be used: {error.strerror}; choose another one with --port"
            raise RunError(why) from error
        with server:
            print_facts([], inspection.notes)
            try:
                click.echo(server.address)
                click.echo("Only this machine, and whoever has this address, can open the page. Ctrl-C ends it.")
                server.serve_forever()
            except KeyboardInterrupt:
                os._exit(0)  # leaving otherwise waits for threads that are computing or inside SQLite


MODES: dict[str, tuple[Callable[[InspectOptions], None], tuple[str, ...]]] = {
    "--export": (write_rows, ("rows_file", "overwrite", "suspects", "rho", "features")),
    "--serve": (serve, ("serves", "port", "neighbours", "to")),
    "--duplicates": (report_duplicates, ("duplicates", "to", "as_json")),
    "--sample": (print_samples, ("ids", "neighbours", "to", "as_json")),
    "a report": (report, _OF_REPORT),
}
"""Mode -> its function, and the options that have an effect in it besides those of all modes; the first asks for it."""
