"""Distribution of tau at every snapshot of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import model_serializer

from ....state_store.durable import Repository, list_snapshots
from ....state_store.errors import DamagedChunkError, SnapshotNotFoundError
from ....state_store.history import Snapshot
from ....state_store.reader import StateReader
from ....state_store.schema import VISITS
from .. import Hidden, OnDone, named, silent
from ..opening import Inspection, pieces
from .distribution import Distribution

T = TypeVar("T")

MAX_ROWS = 200_000_000
"""Limit over all snapshots together: about ten seconds on one core."""
HISTORY_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class TauAt:
    """One side's tau at one snapshot, over the samples visited by then."""

    quantiles: tuple[float, ...]
    """At HISTORY_QUANTILES."""
    share_at_tau_min: float | None
    """0 … 1; None if the objective has no tau_min."""

    @model_serializer
    def _in_json(self) -> dict[str, float | None]:
        quantiles = zip(HISTORY_QUANTILES, self.quantiles, strict=True)
        return {f"q{share:.2f}": value for share, value in quantiles} | {"share_at_tau_min": self.share_at_tau_min}


@dataclass(frozen=True)
class Moment:
    tag: str
    step: int
    visited: int
    """Visited samples among those read."""
    tau: dict[str, TauAt]
    """By side."""


@dataclass(frozen=True)
class ThroughTime:
    """The snapshots of a run that have visited samples, at least one, oldest first."""

    sides: Hidden[tuple[str, ...]]
    """As in the state: `image` and `text`, or `sample`."""
    every: Annotated[int, named("one_block_of")]
    """1: every sample was read. N: one in N blocks of rows, the same ones in every snapshot. Conversion permutes
    sample ids, so this is a fair sample."""
    samples_read: int
    """Per snapshot."""
    moments: Annotated[list[Moment], named("snapshots")]


def through_time(inspection: Inspection, on_progress: OnDone = silent) -> ThroughTime | None:
    """Read tau at every snapshot of the inspection's run; None if there is no tau or no sample was ever visited.

    Memory does not grow with the samples. A snapshot that is damaged, or that the run deletes meanwhile, is left out
    and noted. Calls on_progress after each snapshot.
    """
    reader, sides = inspection.reader, inspection.sides
    if reader is None or not sides:
        return None
    # Whose the rows are does not matter here, so only those of the run are read.
    whole, snapshots = pieces(reader.of_rows()), len(list_snapshots(inspection.run.state))
    every = min(len(whole), -(-reader.kept * snapshots // MAX_ROWS))
    blocks = whole[::every]

    def read(reader: StateReader) -> Moment | None:
        return _read_moment(reader, blocks, sides, inspection.settings.get("tau_min"))

    moments = [moment for moment in read_every_snapshot(inspection, read, on_progress) if moment]
    held = reader.selection
    samples = sum(len(block) if held is None else int(held.are_present(block).sum()) for block in blocks)
    return ThroughTime(sides, every, samples, moments) if moments else None


def read_every_snapshot(inspection: Inspection, read: Callable[[StateReader], T], on_progress: OnDone) -> list[T]:
    """Apply `read` to every snapshot of the inspection's run, oldest first.

    A snapshot that is damaged, or that the run deletes meanwhile, is left out and noted.
    """
    found, path = [], inspection.run.state
    history = Repository(path).history()
    for done, entry in enumerate(history, start=1):
        try:
            # Reopen each time, so that snapshots deleted since the listing are noticed.
            if isinstance(entry, Snapshot):
                found.append(read(StateReader.open(path, entry.id)))
            else:
                inspection.notes.append(f"{entry.tag} is left out: {entry}.")
        except SnapshotNotFoundError:
            inspection.notes.append(f"{entry.tag} is left out: the run deleted it while it was being read.")
        except DamagedChunkError as error:
            inspection.notes.append(f"{entry.tag} is left out: {error}.")
        on_progress(done, len(history))
    inspection.notes[:] = dict.fromkeys(inspection.notes)  # another reading may have noted the same
    return found


def _read_moment(
    reader: StateReader, blocks: list[range], sides: Sequence[str], tau_min: float | None
) -> Moment | None:
    """Return None if no sample was visited yet. blocks: of rows."""
    tau = {side: Distribution() for side in sides}
    visited, stored = 0, reader.of_rows()
    for block in blocks:
        rows = stored.rows(block.start, block.stop, [*(f"{side}/tau" for side in sides), VISITS])
        seen = rows[VISITS] > 0
        if reader.selection is not None:
            seen &= reader.selection.are_present(block)
        visited += int(seen.sum())
        for side, distribution in tau.items():
            distribution.add(rows[f"{side}/tau"][seen])
    if not all(distribution.count for distribution in tau.values()):
        return None
    found = dict[str, TauAt]()
    for side, of_side in tau.items():
        at_tau_min = None if tau_min is None else of_side.share_at_most(tau_min)
        found[side] = TauAt(tuple(map(of_side.quantile, HISTORY_QUANTILES)), at_tau_min)
    return Moment(reader.snapshot.tag, reader.snapshot.step, visited, found)
