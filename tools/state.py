"""`thermopile state`: check and list the per-sample state of a run, finished or still training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..storage.place import Place, Places
from .arguments import RUN, RUN_DATA
from .printing import plain_text, print_facts, print_table
from .progress import in_units, progress_bar, working

if TYPE_CHECKING:
    from ..state_store.check import ColumnReport, Problem, SnapshotReport
    from ..state_store.history import Snapshot
    from ..state_store.reader import StateReader
    from ..trainer.config import TrainConfig

_LATEST = "latest"


@click.group(epilog="\b\nExamples:\n  thermopile state check runs/glyphs\n  thermopile state log runs/glyphs")
def state() -> None:
    """Check the per-sample state and list its snapshots.

    RUN is a run directory or a state directory. Works while the run trains and changes nothing.
    """


@state.command(
    short_help="Check that a snapshot is sound.",
    epilog="\b\nExamples:\n"
    "  thermopile state check runs/glyphs\n"
    "  thermopile state check runs/glyphs --at step-400 --json\n"
    "  thermopile state check runs/glyphs --all\n\n"
    "Exit codes: 0 sound, 1 not sound or not found, 2 wrong usage.",
)
@RUN
@click.option("--at", default=_LATEST, show_default=True, metavar="TAG|ID", help="The snapshot to read.")
@RUN_DATA
@click.option("--all", "every", is_flag=True, help="Check every snapshot, oldest first.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.pass_context
def check(context: click.Context, run: Place, at: str, data: Places | None, every: bool, as_json: bool) -> None:
    """Check that a snapshot of RUN is sound: read every chunk and validate every value.

    Every number must be finite; a sample never visited must hold its initial values, and only there may log_s be -inf;
    tau must lie within the objective's bounds; no last step may be later than the snapshot; the dataset must be the
    run's. The index of the state is compared with its copy. Without --at, every snapshot's files are checked too.
    """
    if every and at != _LATEST:
        raise click.UsageError("--at selects one snapshot and --all selects every one; pass only one of them")
    from ..state_store.durable import Repository

    path, config, notes = _find(run)
    reports = []
    for report in _reports(path, config, data, at, every):
        report.notes[:0] = notes
        reports.append(report)
        if not as_json:
            _print_report(report)
    repository = Repository(path)
    unreadable = repository.unreadable() if at == _LATEST else []
    damage = repository.damage()
    sound = all(report.sound for report in reports) and not unreadable and not damage
    if as_json:
        snapshots, broken = [*map(_report_json, reports)], [*map(asdict, unreadable)]
        findings = {"snapshots": snapshots, "unreadable": broken, "damage": damage}
        click.echo(json.dumps({"state": str(path), "sound": sound, **findings}, allow_nan=False))
    else:
        for snapshot in unreadable:
            print_facts([("problem", str(snapshot))])
            click.echo(f"{snapshot.tag} is NOT SOUND")
        print_facts([("problem", words) for words in damage])
    context.exit(0 if sound else 1)


@state.command(
    short_help="List the snapshots.",
    epilog="\b\nExamples:\n  thermopile state log runs/glyphs\n  thermopile state log runs/glyphs --json",
)
@RUN
@click.option("--json", "as_json", is_flag=True, help="Print the snapshots as one JSON object.")
def log(run: Place, as_json: bool) -> None:
    """List the snapshots of RUN, oldest first, with the time and the bytes written for each."""
    from ..state_store.durable import Repository
    from ..state_store.history import Snapshot

    path, _, _ = _find(run)
    history = Repository(path).history()
    snapshots = [entry for entry in history if isinstance(entry, Snapshot)]
    unreadable = [entry for entry in history if not isinstance(entry, Snapshot)]
    with working(f"measuring {plain_text(str(path))}"):
        size = path.size_below()
    if as_json:
        listed = {"snapshots": [*map(_snapshot_json, snapshots)], "unreadable": [*map(asdict, unreadable)]}
        click.echo(json.dumps({"state": str(path), "bytes_on_disk": size, **listed}, allow_nan=False))
        return
    rows = [
        (entry.tag, f"{entry.step:,}", f"{entry.epoch:,}", _local_time(entry), in_units(entry.bytes_written), entry.id)
        if isinstance(entry, Snapshot)
        else (entry.tag, "–", "–", "unreadable", "–", entry.id)
        for entry in history
    ]
    print_table(("tag", ">step", ">epoch", "when", ">written", "id"), rows)
    on_disk = "" if path.is_remote else " on disk"
    noun = "snapshot" if len(snapshots) == 1 else "snapshots"
    beside = f" and {len(unreadable):,} unreadable" if unreadable else ""
    click.echo(f"{len(snapshots):,} {noun}{beside}, {in_units(size)}{on_disk} in {plain_text(str(path), most=1000)}")


def _find(run: Place) -> tuple[Place, TrainConfig | None, list[str]]:
    """Return the state's path (RUN itself may be one), the run's settings if any, and a note if they are unreadable."""
    from ..trainer.errors import RunError
    from ..trainer.run_directory import RunDirectory

    directory = RunDirectory(run)
    path = directory.state
    if not directory.exists() and not directory.has_state:
        path, directory = run, RunDirectory(run.absolute().parent)
    if not directory.exists() or path.resolve() != directory.state.resolve():
        return path, None, []
    try:
        return path, directory.config(), []
    except RunError as error:
        return path, None, [str(error)]


def _reports(
    path: Place, config: TrainConfig | None, data: Places | None, at: str, every: bool
) -> Iterator[SnapshotReport]:
    from ..state_store.durable import list_snapshots
    from ..state_store.errors import SnapshotNotFoundError
    from ..state_store.reader import StateReader

    found = [snapshot.id for snapshot in list_snapshots(path)] if every else []
    for asked in found or [at]:
        try:
            yield _check(StateReader.open(path, asked), path, config, data)
        except SnapshotNotFoundError as error:
            if not found:
                raise
            click.echo(f"Note: {error}", err=True)  # the run may delete old snapshots while this runs


def _check(reader: StateReader, path: Place, config: TrainConfig | None, data: Places | None) -> SnapshotReport:
    """Check a snapshot, with the bounds of tau and the dataset from the run's settings, if they are known."""
    from ..pipeline.errors import DatasetError
    from ..state_store.check import check_snapshot
    from ..trainer.run.own_dataset import growth, open_own
    from ..trainer.run_directory import RunDirectory

    settings = config.objective.settings if config else {}
    bounds = {name: settings[name] for name in ("tau_min", "tau_max") if settings.get(name) is not None}
    with progress_bar(f"checking {reader.snapshot.tag}", reader.samples) as bar:
        report = check_snapshot(reader, bounds, bar.update)
    has_tau = any(name.split("/")[-1] == "tau" for name in reader.fields)
    if config is None:
        bounds_too = ", and tau not checked against bounds" if has_tau else ""
        report.notes.append(f"No usable run settings are beside the state, so no dataset was compared{bounds_too}.")
        return report
    for name in ("tau_min", "tau_max"):
        if has_tau and name not in bounds:
            report.notes.append(f"Objective {config.objective.name} has no {name}, so tau was not checked against one.")
    made_for, run = reader.dataset_fingerprint, RunDirectory(path.absolute().parent)
    try:
        dataset = open_own(run, data or config.data.places, tars=None)
    except DatasetError as error:
        if data is not None:
            raise
        report.notes.append(f"The run's dataset was not compared, because it cannot be read: {error}")
        return report
    report.notes.extend(growth(run, config, dataset))
    if dataset.index.fingerprint != made_for:
        wanted = f"dataset {made_for[:12]}… with {reader.samples:,} samples"
        found = f"{dataset.place} is {dataset.index.fingerprint[:12]}… with {dataset.n:,}"
        report.other_problems.append(f"the state is for {wanted}, but {found}")
    return report


def _print_report(report: SnapshotReport) -> None:
    snapshot = report.snapshot
    click.echo(f"{snapshot.tag}  epoch {snapshot.epoch:,}, {_local_time(snapshot)}, {snapshot.id}")
    print_table(("column", "dtype", ">rows", ">unseen", ">range", "verdict"), [_row(each) for each in report.columns])
    problems = []
    for column in report.columns:
        problems += [_in_words(column, problem) for problem in column.problems]
        if column.problems_not_listed:
            problems.append(f"array {column.name!r}: {column.problems_not_listed:,} more, in later chunks")
    print_facts([("problem", words) for words in [*problems, *report.other_problems]], report.notes)
    click.echo(f"{snapshot.tag} is {'sound' if report.sound else 'NOT SOUND'}")


def _row(column: ColumnReport) -> tuple[str, ...]:
    values = "–" if column.lowest is None else f"{column.lowest:.4g} … {column.highest:.4g}"
    count = len(column.problems) + column.problems_not_listed
    verdict = "sound" if column.sound else "1 problem" if count == 1 else f"{count:,} problems"
    return column.name, column.dtype, f"{column.rows:,}", f"{column.unseen:,}", values, verdict


def _in_words(column: ColumnReport, problem: Problem) -> str:
    if not problem.rows:
        return problem.what
    ids = ", ".join(map(str, problem.first_ids)) + (", …" if problem.rows > len(problem.first_ids) else "")
    noun = "row" if problem.rows == 1 else "rows"
    return f"array {column.name!r}, chunk {problem.chunk}: {problem.rows:,} {noun} {problem.what}; ids {ids}"


def _report_json(report: SnapshotReport) -> dict[str, Any]:
    columns = [{**asdict(column), "sound": column.sound} for column in report.columns]
    found = {"sound": report.sound, "columns": columns, "other_problems": report.other_problems, "notes": report.notes}
    return _snapshot_json(report.snapshot) | found


def _snapshot_json(snapshot: Snapshot) -> dict[str, Any]:
    facts = {name: value for name, value in asdict(snapshot).items() if name != "files"}
    return {"tag": snapshot.tag, **facts, "written_at": snapshot.written_at.isoformat()}


def _local_time(snapshot: Snapshot) -> str:
    return f"{snapshot.written_at.astimezone():%Y-%m-%d %H:%M:%S}"
