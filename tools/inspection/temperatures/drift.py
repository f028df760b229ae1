"""Compare two snapshots of a run sample by sample: how far tau moved, and for which samples most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated

import numpy as np

from ....state_store.durable import list_snapshots
from ....state_store.history import Snapshot
from ....state_store.reader import StateReader
from ....state_store.schema import VISITS
from ....trainer.errors import ConfigError
from .. import BY_NAME, AsJson, Float32s, Hidden, Int64s, OnDone, named, silent
from ..opening import Inspection, read_blocks
from .correlation import Joint, JointCounts
from .distribution import Distribution, Figures, Smallest
from .survey import with_tau

MOVERS = 24

Tau = dict[str, Float32s]
"""Side -> float32 [m]."""


@dataclass(frozen=True)
class Mover:
    """A sample whose tau moved, with its tau at both snapshots."""

    sample_id: int
    before: float
    after: float


@dataclass(frozen=True)
class SideDrift:
    """How one side's tau moved, over the samples visited in both snapshots."""

    name: Hidden[str]
    """As in the state: `image`, `text` or `sample`."""
    joint: Annotated[Joint, AsJson(attrgetter("spearman")), named("spearman")]
    """Tau at the earlier snapshot (rows) against tau at the later one, and their rank correlation."""
    change: Figures
    """Later tau minus earlier tau."""
    share_risen: float
    """0 … 1."""
    share_fallen: float
    most_risen: list[Mover]
    """At most 24, the largest rise first; among equals, the lowest id."""
    most_fallen: list[Mover]


@dataclass(frozen=True)
class Drift:
    """Drift from the snapshot with the lower step to the other, in whichever order they were named; or between runs."""

    earlier: Annotated[Snapshot, AsJson(attrgetter("tag")), named("from")]
    later: Annotated[Snapshot, AsJson(attrgetter("tag")), named("to")]
    visited: int
    """Samples visited by both snapshots."""
    sides: Annotated[list[SideDrift], BY_NAME]


def drift(inspection: Inspection, against: str | Inspection, on_progress: OnDone = silent) -> Drift | None:
    """Compare the inspection's snapshot with another one, of its run by tag or id or of another run, which is later.

    Returns None, with a note, if no sample was visited by both, and None if the run has no tau. Memory does not grow
    with the samples. Calls on_progress with the rows read. Raises ConfigError if both are the same snapshot,
    SnapshotNotFoundError if the other does not exist or the run deletes one meanwhile, DamagedChunkError.
    """
    if inspection.reader is None or not (names := inspection.sides):
        return None
    if isinstance(against, Inspection):
        earlier, later = inspection.reader, against.reader
        names = tuple(name for name in names if name in against.sides)
        if later is None or not names or earlier.dataset_fingerprint != later.dataset_fingerprint:
            inspection.notes.append("The runs have no temperatures of the same dataset and side, so none are compared.")
            return None
    else:
        earlier, later = in_order(inspection, inspection.reader, against)
    counts = {name: _SideCounts() for name in names}
    for block, ids, before, after in _blocks(earlier, later, names, inspection.planted[0]):
        for name, side in counts.items():
            side.add(ids, before[name], after[name])
        on_progress(block.stop, 2 * earlier.samples)
    visited = counts[names[0]].change.count
    if not visited:
        both = f"both {earlier.snapshot.tag} and {later.snapshot.tag}"
        inspection.notes.append(f"No sample was visited by {both}, so there is no drift to show.")
        return None
    joints = {name: JointCounts(side.before, side.after) for name, side in counts.items()}
    for block, _, before, after in _blocks(earlier, later, names, inspection.planted[0]):
        for name, joint in joints.items():
            joint.add(before[name], after[name])
        on_progress(earlier.samples + block.stop, 2 * earlier.samples)
    sides = []
    for name, side in counts.items():
        risen, fallen = 1 - side.change.share_at_most(0), side.change.share_below(0)
        movers = (_movers(earlier, later, f"{name}/tau", most) for most in (side.most_risen, side.most_fallen))
        sides.append(SideDrift(name, joints[name].result(), side.change, risen, fallen, *movers))
    return Drift(earlier.snapshot, later.snapshot, visited, sides)


def in_order(inspection: Inspection, reader: StateReader, against: str) -> tuple[StateReader, StateReader]:
    """Return both snapshots, the earlier one first. Raises ConfigError, SnapshotNotFoundError, as `drift` does."""
    other = StateReader.open(inspection.run.state, against)
    if other.snapshot.id == reader.snapshot.id:
        tags = ", ".join(snapshot.tag for snapshot in list_snapshots(inspection.run.state))
        raise ConfigError(f"cannot compare {reader.snapshot.tag} with itself, as {against}; choose another of: {tags}")
    return (other, reader) if other.snapshot.step < reader.snapshot.step else (reader, other)


def _blocks(
    earlier: StateReader, later: StateReader, sides: Sequence[str], planted: Int64s
) -> Iterator[tuple[range, Int64s, Tau, Tau]]:
    """Yield per block the samples visited by both, but planted ones: ids, int64 [m], and tau at each snapshot."""
    columns = [*(f"{side}/tau" for side in sides), VISITS]
    for block, before in read_blocks(earlier, columns):
        after = later.rows(block.start, block.stop, columns)  # of another run, its blocks may be of another size
        seen = with_tau(before, sides) & with_tau(after, sides) & ~np.isin(np.arange(block.start, block.stop), planted)
        tau_before, tau_after = ({side: rows[f"{side}/tau"][seen] for side in sides} for rows in (before, after))
        yield block, np.flatnonzero(seen) + block.start, tau_before, tau_after


class _SideCounts:
    def __init__(self) -> None:
        self.before, self.after, self.change = Distribution(), Distribution(), Distribution()
        self.most_risen, self.most_fallen = Smallest(MOVERS), Smallest(MOVERS)

    def add(self, ids: Int64s, before: Float32s, after: Float32s) -> None:
        change = after - before
        self.before.add(before)
        self.after.add(after)
        self.change.add(change)
        rose, fell = change > 0, change < 0
        self.most_risen.add(ids[rose], -change[rose])
        self.most_fallen.add(ids[fell], change[fell])


def _movers(earlier: StateReader, later: StateReader, column: str, most: Smallest) -> list[Mover]:
    ids = most.chosen()[0]
    before, after = (reader.rows_at(ids, [column])[column].tolist() for reader in (earlier, later))
    return list(map(Mover, ids.tolist(), before, after))
