"""Compare two snapshots of a run sample by sample: how far tau moved, and for which samples most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...state_store import Snapshot, StateReader, list_snapshots
from ...state_store.schema import VISITS
from ...trainer.errors import ConfigError
from ..state_blocks import read_blocks
from .distribution import Distribution
from .joint import Joint, JointCounts
from .run import Inspection
from .smallest_k import Smallest
from .survey import with_tau

MOVERS = 24

Tau = dict[str, NDArray[np.float32]]
"""Side -> float32 [m]."""


class Mover(NamedTuple):
    """A sample whose tau moved, with its tau at both snapshots."""

    sample_id: int
    before: float
    after: float


@dataclass(frozen=True)
class SideDrift:
    """How one side's tau moved, over the samples visited in both snapshots."""

    name: str
    """As in the state: `image`, `text` or `sample`."""
    joint: Joint
    """Tau at the earlier snapshot (rows) against tau at the later one, and their rank correlation."""
    change: Distribution
    """Later tau minus earlier tau."""
    share_risen: float
    """0 … 1."""
    share_fallen: float
    most_risen: list[Mover]
    """At most 24, the largest rise first; among equals, the lowest id."""
    most_fallen: list[Mover]


@dataclass(frozen=True)
class Drift:
    """Drift from the snapshot with the lower step to the other, in whichever order they were named."""

    earlier: Snapshot
    later: Snapshot
    visited: int
    """Samples visited by both snapshots."""
    sides: list[SideDrift]


def drift(
    inspection: Inspection, against: str, notes: list[str], on_progress: Callable[[int], None] = lambda done: None
) -> Drift | None:
    """Compare the inspection's snapshot with another one of its run, given by tag or id, in two passes over both.

    Returns None, with a note, if no sample was visited by both, and None if the run has no tau. Memory does not grow
    with the samples. Calls on_progress with the rows read so far, out of twice the number of samples.
    Raises ConfigError if both are the same snapshot, SnapshotNotFoundError if the other does not exist or the run
    deletes one meanwhile, DamagedChunkError.
    """
    if inspection.reader is None or not inspection.sides:
        return None
    earlier, later = in_order(inspection, inspection.reader, against)
    sides = [_SideCounts(name) for name in inspection.sides]
    visited = 0
    for block, ids, before, after in _blocks(earlier, later, inspection.sides):
        visited += len(ids)
        for side in sides:
            side.add(ids, before[side.name], after[side.name])
        on_progress(block.stop)
    if not visited:
        notes.append(f"No sample was visited by both {earlier.snapshot.tag} and {later.snapshot.tag}, so "
                     "there is no drift to show.")  # fmt: skip
        return None
    joints = [_JointSide(side) for side in sides]
    for block, ids, before, after in _blocks(earlier, later, inspection.sides):
        for joint in joints:
            joint.add(ids, before[joint.side.name], after[joint.side.name])
        on_progress(earlier.samples + block.stop)
    return Drift(earlier.snapshot, later.snapshot, visited, [joint.result() for joint in joints])


def in_order(inspection: Inspection, reader: StateReader, against: str) -> tuple[StateReader, StateReader]:
    """Return both snapshots, the earlier one first. Raises ConfigError, SnapshotNotFoundError, as `drift` does."""
    other = StateReader.open(inspection.run.state, against)
    if other.snapshot.id == reader.snapshot.id:
        tags = ", ".join(snapshot.tag for snapshot in list_snapshots(inspection.run.state))
        raise ConfigError(
            f"cannot compare {reader.snapshot.tag} with itself (the other snapshot was given as {against}). "
            f"Choose another one of: {tags}"
        )
    return (other, reader) if other.snapshot.step < reader.snapshot.step else (reader, other)


def _blocks(
    earlier: StateReader, later: StateReader, sides: Sequence[str]
) -> Iterator[tuple[range, NDArray[np.int64], Tau, Tau]]:
    """Yield per block the samples visited by both: ids, int64 [m], and tau at each snapshot."""
    columns = [*(f"{side}/tau" for side in sides), VISITS]
    blocks = zip(read_blocks(earlier, columns), read_blocks(later, columns), strict=True)
    for (block, before), (_, after) in blocks:
        seen = with_tau(before, sides) & with_tau(after, sides)
        tau_before, tau_after = ({side: rows[f"{side}/tau"][seen] for side in sides} for rows in (before, after))
        yield block, np.flatnonzero(seen) + block.start, tau_before, tau_after


class _SideCounts:
    """First pass over all rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.before, self.after, self.change = Distribution(), Distribution(), Distribution()
        self.risen = self.fallen = 0
        self.most_risen, self.most_fallen = Smallest(MOVERS), Smallest(MOVERS)

    def add(self, ids: NDArray[np.int64], before: NDArray[np.float32], after: NDArray[np.float32]) -> None:
        change = after - before
        self.before.add(before)
        self.after.add(after)
        self.change.add(change)
        rose, fell = change > 0, change < 0
        self.risen += int(rose.sum())
        self.fallen += int(fell.sum())
        self.most_risen.add(ids[rose], -change[rose])
        self.most_fallen.add(ids[fell], change[fell])


class _JointSide:
    """Second pass over all rows, which needs the results of the first."""

    def __init__(self, side: _SideCounts) -> None:
        self.side = side
        self._counts = JointCounts(side.before, side.after)
        self._risen, self._fallen = (most.chosen()[0].tolist() for most in (side.most_risen, side.most_fallen))
        self._movers: dict[int, Mover] = {}

    def add(self, ids: NDArray[np.int64], before: NDArray[np.float32], after: NDArray[np.float32]) -> None:
        self._counts.add(before, after)
        for place in np.flatnonzero(np.isin(ids, self._risen + self._fallen)).tolist():
            mover = Mover(int(ids[place]), float(before[place]), float(after[place]))
            self._movers[mover.sample_id] = mover

    def result(self) -> SideDrift:
        side = self.side
        return SideDrift(
            name=side.name,
            joint=self._counts.result(),
            change=side.change,
            share_risen=side.risen / side.change.count,
            share_fallen=side.fallen / side.change.count,
            most_risen=[self._movers[sample_id] for sample_id in self._risen],
            most_fallen=[self._movers[sample_id] for sample_id in self._fallen],
        )
