"""`thermopile inspect`: a run's temperatures in the terminal, as an HTML page, as rows, or served to a browser."""

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from pydantic import TypeAdapter

from ..pipeline.opening import Dataset
from ..storage.files import may_make, refuse_link
from ..storage.place import AnyPlace, Place, Places, place_of
from ..trainer.config import Weights
from ..trainer.errors import RunError
from ..trainer.run_directory import RunDirectory, refuse_in_run
from .arguments import ALLOW, RUN, RUN_DATA, WEIGHTS
from .inspection import summary
from .inspection.as_json import duplicates_to_json, samples_to_json, to_json
from .inspection.duplicates.finding import DUPLICATES, find_duplicates, write_duplicates
from .inspection.duplicates.representatives import read_scores
from .inspection.feature_findings.by_features import by_features, json_quantiles
from .inspection.features.confirmation import confirm
from .inspection.features.features_file import NAME, FeaturesFile
from .inspection.features.neighbours import ANCHORS, Neighbours, find_neighbours
from .inspection.features.run_features import DEFAULT, DRAWN, Asked, run_features, wanted_features
from .inspection.features.solving import SolvedTemperatures, solve_other
from .inspection.findings import Findings, look, read_again
from .inspection.opening import LATEST, Inspection, OtherDatasetError
from .inspection.rows_export import check_target, export_rows, export_solved
from .inspection.temperatures.kinds import KindRules
from .inspection.temperatures.misfits import exported, misfits
from .inspection.temperatures.samples import InspectedSample, read_histories, read_samples
from .inspection.temperatures.survey import Survey, survey
from .printing import plain_text, print_facts, print_table
from .progress import in_units, task_bars, working
from .report.duplicates import duplicate_facts, write_duplicates_page
from .report.neighbourhood import listed_ids, listings, table_of
from .report.page import write_report, write_samples
from .report.sheets import facts, number, state_word

_OPTIONS = {
    "--export": ["rows_file", "overwrite", "suspects", "rho", "features"],
    "--serve": ["serves", "port", "neighbours", "to"],
    "--duplicates": ["duplicates", "to", "as_json"],
    "--sample": ["ids", "neighbours", "to", "as_json"],
    "a report": ["against", "by", "with_map", "suspects", "rho", "features", "to", "as_json"],
}
"""Mode -> options that have an effect in it, besides those of all modes."""
_FOR_OTHER = {"run", "at", "data", "rho", "features", "weights", "allow_code", "rows_file", "overwrite", "as_json"}
"""Options that have an effect on a dataset that the run was not trained on."""


class Features(click.ParamType[int]):
    """A number of samples, `all` or `none`."""

    name = "features"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        words = {"all": 1 << 40, "none": 0}  # more than any dataset has
        return words[value] if value in words else click.IntRange(1).convert(value, param, ctx)


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
        """The mode; a key of _OPTIONS."""
        given = {
            "--export": self.rows_file,
            "--serve": self.serves,
            "--duplicates": self.duplicates,
            "--sample": self.ids,
        }
        return next((mode for mode, asked in given.items() if asked), "a report")


@click.command(
    short_help="Summarise the temperatures of a run.",
    epilog="\b\nExamples:\n"
    "  thermopile inspect runs/cc3m\n"
    "  thermopile inspect runs/cc3m --at step-12000 --against step-4000\n"
    "  thermopile inspect runs/cc3m --by folder --map\n"
    "  thermopile inspect runs/cc3m --confirm 5000\n"
    "  thermopile inspect runs/cc3m --sample 1204 77\n"
    "  thermopile inspect runs/cc3m --sample 1204 --neighbours 20\n"
    "  thermopile inspect runs/cc3m --duplicates\n"
    "  thermopile inspect runs/cc3m --serve\n"
    "  thermopile inspect runs/cc3m --serve --neighbours 20\n"
    "  thermopile inspect runs/cc3m --export rows.parquet",
)
@RUN
@click.argument("more_ids", type=click.IntRange(min=0), nargs=-1, metavar="[MORE IDS]...")
@click.option("--at", default=LATEST, show_default=True, metavar="TAG|ID", help="The snapshot to inspect.")
@click.option(
    "--against", metavar="TAG|ID", help="Compare with this snapshot: how far tau moved, and for which samples most."
)
@click.option(
    "--by",
    multiple=True,
    default=("group",),
    metavar="COLUMN",
    show_default="group, the class",
    help="Group by a column of the samples table, or by `folder`. Repeatable.",
)
@click.option("--map", "with_map", is_flag=True, help="Add a t-SNE map of the embeddings, by tau and the first --by.")
@click.option(
    "--confirm",
    "suspects",
    type=click.IntRange(1),
    is_flag=False,
    flag_value=20_000,
    default=None,
    metavar="[N]",
    help="Decide the kinds of the N most suspicious samples (20,000 without a number) by a "
    "forward pass of the encoders.",
)
@click.option(
    "--rho",
    type=click.FloatRange(0, min_open=True),
    metavar="RHO",
    help="Solve temperatures at this rho instead of the run's; needed where the objective has none (1 for pairs).",
)
@click.option(
    "--features",
    type=Features(),
    metavar="N|all|none",
    show_default="as many as a minute allows, 4096 at least",
    help="How many samples' features to make where too few are kept.",
)
@WEIGHTS
@click.option(
    "--sample",
    "ids",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="ID [ID…]",
    help="Show everything about these samples instead; RUN comes first.",
)
@click.option(
    "--neighbours",
    type=click.IntRange(1, 100),
    metavar="K",
    help="With --sample or --serve: add the K nearest pictures and captions, and the K hardest negatives, by "
    "features of all samples, which are made once.",
)
@click.option(
    "--duplicates",
    is_flag=True,
    help="Look for duplicates instead: write RUN/report/duplicates.parquet and duplicates.html.",
)
@click.option(
    "--export",
    "rows_file",
    type=click.Path(path_type=Path),
    metavar="NAME.parquet|csv|fiftyone",
    help="Write one row per sample instead; .fiftyone: a folder with the pictures, which FiftyOne imports.",
)
@click.option(
    "--serve",
    "serves",
    is_flag=True,
    help="Serve a page of all samples to this machine's browser instead: search, page through, select.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="Port of --serve.")
@click.option("--overwrite", is_flag=True, help="Let --export replace an existing file.")
@RUN_DATA
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Directory of the page, made if it is missing. Default: RUN/report.",
)
@ALLOW
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object and write no page.")
@click.pass_context
def command(context: click.Context, /, more_ids: tuple[int, ...], **options: Any) -> None:
    """Summarise the temperatures of RUN and write RUN/report/report.html, with --at report-step-N.html; with --json,
    only print.

    Works while the run trains: reads the latest snapshot and changes nothing else. Needs no GPU. --data may name
    another dataset, for whose samples temperatures are solved from the features of the run's encoders.
    """
    asked = InspectOptions(**options | {"suspects": options["suspects"] or 0})
    if more_ids and not asked.ids:
        raise click.UsageError(f"unexpected argument {more_ids[0]}; sample ids come after --sample")
    if asked.neighbours and not (asked.ids or asked.serves):
        raise click.UsageError("--neighbours needs samples: --sample ID --neighbours K, or --serve --neighbours K")
    _refuse_others(context, asked.mode, _used(asked))
    asked = replace(asked, ids=(*asked.ids, *more_ids), by=tuple(dict.fromkeys(asked.by)))
    try:
        _SHOW[asked.mode](asked)
    except OtherDatasetError as error:
        if asked.mode not in ("a report", "--export"):
            raise
        _refuse_others(context, "the --data of another dataset", _FOR_OTHER)
        solve_other_dataset(asked, error.dataset)


def _used(asked: InspectOptions) -> set[str]:
    used = {"run", "more_ids", "at", "data", *_OPTIONS[asked.mode]}
    if asked.mode == "a report" or asked.suspects or asked.neighbours or asked.duplicates or asked.features:
        used |= {"weights", "allow_code"}
    if asked.as_json and not (asked.neighbours or asked.duplicates):
        used -= {"to"}
    return used


def _refuse_others(context: click.Context, mode: str, used: set[str]) -> None:
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if extra := [option for option in context.command.params if option.name in given - used]:
        names, beside = ", ".join(option.opts[0] for option in extra), mode
        if "as_json" in given & used and extra[0].name == "to":
            beside = "--json"
        elif {option.name for option in extra} <= {"weights", "allow_code"}:
            beside = f"{mode} that needs no encoders"
        raise click.UsageError(f"{names} has no effect with {beside}; leave out one of them")


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
    names = [*_OPTIONS["a report"], "at", "data", "weights", "allow_code"]
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
    messages = [("warning", warning) for warning in findings.warnings] + [("note", note) for note in findings.notes]
    print_facts(
        [
            *(("" if place else "found", first) for place, first in enumerate(findings.first_sentences)),
            *summary.facts(findings.inspection, survey),
            *messages,
        ]
    )
    if survey is None:
        return
    if survey.sides:
        names = [f">{side.name}" for side in survey.sides]
        ends = ["lowest … highest", *(summary.sparkline(side.tau) for side in survey.sides)]
        rows = [*summary.table(findings.inspection, survey, summary.TERMINAL_QUANTILES), ends]
        print_table([summary.HEAD, *names], rows)
        if drift := findings.drift:
            print_table([f"from {drift.earlier.tag} to {drift.later.tag}", *names], summary.drift_table(drift))
    if survey.parts and survey.sides:
        rows = [
            [of["part"], f"{of['samples']:,}", *map(summary.tau, of["mean_tau"].values())]
            for of in survey.parts.means()
        ]
        print_table(["part", ">samples", *(f">mean tau ({side})" for side in survey.parts.tau)], rows)
    if found := findings.by_features:
        print_table(*summary.solved_table(found))
        for side, of_side in found.associations.items():
            head, rows = summary.associations_table(of_side)
            print_table([head[0] if side == "sample" else f"{side}: {head[0]}", *head[1:]], rows)
    kinds = survey.kinds if survey.kinds and survey.kinds.worth_showing else None
    if kinds is None and found is None:
        return
    head, rows = summary.kinds_table(kinds, found.kinds if found else None)
    print_table([head[0], *(f">{title}" for title in head[1:])], rows)
    if kinds is None:
        return
    print_facts([("" if place else "misfits", sentence) for place, sentence in enumerate(findings.of_misfits)])
    if survey.doubted:
        print_facts([("doubted", summary.came_back(survey.doubted))])
    if confirmation := findings.confirmation:
        print_facts([("forward pass", summary.confirmation(confirmation))])


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
    print_facts([*summary.facts(inspection, surveyed), *(("note", note) for note in inspection.notes)])
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
    print_facts(
        [*summary.facts(inspection, None), *duplicate_facts(found), *(("note", note) for note in inspection.notes)]
    )
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
                more = exported(*misfits(inspection, show), inspection, samples)
            export_rows(inspection, to, partial(show, "exporting"), confirmation, of_features, more)
        return inspection, samples

    check_target(to, overwrite=asked.overwrite)
    inspection, samples = read_again(write, asked.run, asked.at, asked.data)
    print_facts([("note", note) for note in inspection.notes])
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
    print_facts([("checkpoint", f"{found.checkpoint}, {found.weights} weights"), ("note", note)])
    number = f"{len(found.sample_ids):,} of {dataset.n:,} samples"
    head = [f"tau where KL is rho = {found.rho:g}, of {number}", *(f">{side}" for side in tau)]
    print_table(head, summary.solved_quantiles(tau))


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
            print_facts([("note", note) for note in inspection.notes])
            try:
                click.echo(server.address)
                click.echo("Only this machine, and whoever has this address, can open the page. Ctrl-C ends it.")
                server.serve_forever()
            except KeyboardInterrupt:
                os._exit(0)  # leaving otherwise waits for threads that are computing or inside SQLite


_SHOW = {
    "--export": write_rows,
    "--serve": serve,
    "--duplicates": report_duplicates,
    "--sample": print_samples,
    "a report": report,
}
"""Mode -> its function."""
