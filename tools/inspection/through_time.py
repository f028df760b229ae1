"""The temperatures at every snapshot of a run: how tau was distributed at each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from ...state_store import DamagedChunkError, Snapshot, SnapshotNotFoundError, StateReader, list_snapshots
from ...state_store.durable import Repository
from ...state_store.schema import VISITS
from ..state_blocks import pieces
from .distribution import Distribution
from .run import Inspection

T = TypeVar("T")
Progress = Callable[[int], None]

MAX_ROWS = 200_000_000
"""Of all snapshots together: about ten seconds of one core."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class TauAt(NamedTuple):
    """One side's tau at one snapshot, over the samples visited by then."""

    quantiles: tuple[float, ...]
    """At QUANTILES."""
    share_at_tau_min: float | None
    """0 … 1; None where the objective has no tau_min."""


class Moment(NamedTuple):
    """One snapshot."""

    snapshot: Snapshot
    visited: int
    """Of the samples read."""
    tau: dict[str, TauAt]
    """By side."""


@dataclass(frozen=True)
class ThroughTime:
    """The snapshots of a run that have a visited sample, at least one, oldest first."""

    sides: tuple[str, ...]
    """As in the state: `image` and `text`, or `sample`."""
    moments: list[Moment]
    every: int
    """1: every sample was read. Else one block of rows of so many, the same ones in every snapshot. Sample ids are
    permuted when a dataset is converted, so these are a fair draw of all."""
    samples_read: int
    """Of each snapshot."""


def through_time(
    inspection: Inspection, notes: list[str], on_progress: Progress = lambda done: None
) -> ThroughTime | None:
    """Read tau at every snapshot of the inspection's run; None where there is no tau, or no sample was ever visited.

    Memory does not grow with the samples. A snapshot that is damaged, or that the run deletes meanwhile, is left out
    and noted. on_progress is told after each snapshot how many of the history's are done.
    """
    sides = inspection.sides
    if inspection.reader is None or not sides:
        return None
    blocks, every = _blocks_to_read(inspection.reader, len(list_snapshots(inspection.run.state)))

    def read(reader: StateReader) -> Moment | None:
        return _read_moment(reader, blocks, sides, inspection.tau.lowest)

    found = read_every_snapshot(inspection.run.state, read, notes, on_progress)
    moments = [moment for moment in found if moment]
    return ThroughTime(sides, moments, every, sum(map(len, blocks))) if moments else None


def read_every_snapshot(
    path: Path, read: Callable[[StateReader], T], notes: list[str], on_progress: Progress = lambda done: None
) -> list[T]:
    """What `read` makes of every snapshot of the state at `path`, oldest first.

    One that is damaged, or that the run deletes meanwhile, is left out and noted.
    """
    found, history = [], Repository.open(path).history()
    for done, entry in enumerate(history, start=1):
        try:
            # Opened anew each time: what was deleted since the history was listed is then known to be deleted.
            if isinstance(entry, Snapshot):
                found.append(read(StateReader.open(path, entry.id)))
            else:
                notes.append(f"{entry.tag} is left out: {entry}.")
        except SnapshotNotFoundError:
            notes.append(f"{entry.tag} is left out: the run deleted it while it was being read.")
        except DamagedChunkError as error:
            notes.append(f"{entry.tag} is left out: {error}.")
        on_progress(done)
    return found


def _blocks_to_read(reader: StateReader, snapshots: int) -> tuple[list[range], int]:
    """The blocks of rows to read of each snapshot, and that they are one of how many."""
    whole = pieces(reader)
    every = min(len(whole), -(-reader.samples * snapshots // MAX_ROWS))
    return whole[::every], every


def _read_moment(
    reader: StateReader, blocks: list[range], sides: tuple[str, ...], tau_min: float | None
) -> Moment | None:
    """None where no sample was visited yet."""
    tau = {side: Distribution() for side in sides}
    visited = 0
    for block in blocks:
        rows = reader.rows(block.start, block.stop, [*(f"{side}/tau" for side in sides), VISITS])
        seen = rows[VISITS] > 0
        visited += int(seen.sum())
        for side, distribution in tau.items():
            distribution.add(rows[f"{side}/tau"][seen])
    if not all(distribution.count for distribution in tau.values()):
        return None
    return Moment(reader.snapshot, visited, {side: _tau_at(found, tau_min) for side, found in tau.items()})


def _tau_at(tau: Distribution, tau_min: float | None) -> TauAt:
    at_floor = None if tau_min is None else tau.share_at_most(tau_min)
    return TauAt(tuple(tau.quantile(share) for share in QUANTILES), at_floor)
