"""Inspect a run: collect everything requested, with progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ...state_store import SnapshotNotFoundError
from ...state_store.durable import Repository
from ...trainer.run_directory import RunDirectory
from ..progress import progress_bar, working
from .details import read_details
from .drift import Drift, drift, in_order
from .embedding_map import EmbeddingMap, embedding_map
from .findings import Findings, shown_ids
from .groups import CLASS_COLUMN
from .run import LATEST, Inspection, read_run
from .survey import Survey, survey
from .through_time import ThroughTime, through_time

T = TypeVar("T")

TRIES = 5
"""A run that keeps few snapshots may delete the one being read."""
ROWS_IN_TWO_SECONDS = 1_000_000
"""Shorter work needs no progress bar."""


def look(
    run: Path, *, at: str = LATEST, against: str | None = None, by: Sequence[str] = (CLASS_COLUMN,),
    with_map: bool = False, data: Path | None = None,
) -> Findings:  # fmt: skip
    """Inspect a run at one snapshot, and its history up to it.

    at, against: tags, ids, or `latest`. by: columns to group the samples by. data: new path of the dataset.
    Raises RunError, StateStoreError, DatasetError, and ConfigError if `against` names the same snapshot.
    """
    if with_map:  # the map draws and colours its samples by class
        by = tuple(dict.fromkeys((*by, CLASS_COLUMN)))

    def read(inspection: Inspection) -> Findings:
        """Read everything that the run may delete meanwhile."""
        if against and inspection.reader:
            in_order(inspection, inspection.reader, against)  # fail on a wrong name before reading all rows
        found = survey_with_progress(inspection, by)
        notes = found.notes if found else inspection.notes
        if found is None or not found.sides:
            return Findings(inspection, found, notes)
        moved = _drift(inspection, against, notes) if against else None
        return Findings(inspection, found, notes, moved, read_details(inspection, shown_ids(found, moved)))

    findings = read_again(read, run, at, data)
    if findings.survey is None or not findings.survey.sides:
        return findings
    return replace(
        findings,
        through_time=_through_time(findings.inspection, findings.notes),
        map=_map(findings.inspection, findings.survey, findings.notes) if with_map else None,
    )


def read_again(read: Callable[[Inspection], T], run: Path, at: str, data: Path | None) -> T:
    """Return `read` of a run's snapshot; if `latest` is deleted meanwhile, retry with the new latest.

    Raises what `read` and `read_run` raise.
    """
    for _ in range(TRIES - 1):
        try:
            return read(read_run(RunDirectory(run), at=at, data=data))
        except SnapshotNotFoundError:
            if at != LATEST:
                raise
    return read(read_run(RunDirectory(run), at=at, data=data))


def survey_with_progress(inspection: Inspection, by: Sequence[str]) -> Survey | None:
    rows = 2 * inspection.reader.samples if inspection.reader else 0
    with progress_bar("reading the state", rows, hidden=rows < ROWS_IN_TWO_SECONDS) as bar:
        return survey(inspection, by, bar.update)


def _through_time(inspection: Inspection, notes: list[str]) -> ThroughTime | None:
    assert inspection.reader is not None
    hidden = inspection.reader.samples < ROWS_IN_TWO_SECONDS
    history = Repository.open(inspection.run.state).history()
    with progress_bar("reading all snapshots", len(history), hidden=hidden) as bar:
        return through_time(inspection, notes, bar.update)


def _drift(inspection: Inspection, against: str, notes: list[str]) -> Drift | None:
    assert inspection.reader is not None
    rows = 2 * inspection.reader.samples
    with progress_bar("comparing snapshots", rows, hidden=rows < ROWS_IN_TWO_SECONDS) as bar:
        return drift(inspection, against, notes, bar.update)


def _map(inspection: Inspection, found: Survey, notes: list[str]) -> EmbeddingMap | None:
    with working("map of the embeddings") as status:
        return embedding_map(
            inspection, found, notes,
            lambda what, done, total: status.update(f"map of the embeddings: {what} {done:,}/{total:,}"),
        )  # fmt: skip
