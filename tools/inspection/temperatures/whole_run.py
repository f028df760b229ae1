"""Rank samples by log s over a run's snapshots: misfits that the model has learnt by heart since were high earlier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....state_store import SnapshotNotFoundError, StateReader, list_snapshots
from ....state_store.schema import VISITS
from .. import OnDone
from ..opening import Inspection, Rows, read_blocks
from .distribution import Distribution
from .kinds import KindRules
from .through_time import read_every_snapshot

MAX_SNAPSHOTS = 16
"""Of more, one in two is read, or one in three and so on, the last among them."""


@dataclass(frozen=True)
class Doubted:
    """Which pairs a run with `doubt_after` doubted, as far as its snapshots show."""

    shares: dict[int, float]
    """Step of a snapshot -> share of the samples with MIN_VISITS visits whose negatives outweigh the positive, 0 … 1.
    Before `doubt_after` they were not doubted yet."""
    came_back: int
    """Samples that were among them at a snapshot, and are not at the last."""


class WholeRun:
    """Log s of a run's samples at all of its snapshots up to the inspected one. Takes 16 MB of memory for each."""

    def __init__(self, inspection: Inspection, on_progress: OnDone = lambda done, total: None):
        """Read every row once; there must be a snapshot. Calls on_progress with the rows read.

        A snapshot that is damaged, or that the run deletes meanwhile, is left out and noted.
        """
        assert inspection.reader is not None
        self._rules, last = KindRules.of(inspection), inspection.reader.snapshot.step
        self._columns = [VISITS, *(f"{side}/log_s" for side in self._rules.log_s)]
        self._notes = inspection.notes
        steps = [snapshot.step for snapshot in list_snapshots(inspection.run.state)]
        wanted = [step for step in steps if 0 < step <= last and self._rules.log_s]
        every = max(1, -(-len(wanted) // MAX_SNAPSHOTS))
        wanted = wanted[(len(wanted) - 1) % every :: every]

        def read(reader: StateReader) -> tuple[StateReader, Distribution] | None:
            if (step := reader.snapshot.step) not in wanted:
                return None
            scores, samples = Distribution(), reader.samples
            for block, rows in read_blocks(reader, self._columns):
                scores.add(self._scores(self._rules.judged(rows, block))[0])
                on_progress(wanted.index(step) * samples + block.stop, len(wanted) * samples)
            return reader, scores

        self._snapshots = [found for found in read_every_snapshot(inspection, read) if found and found[1].count]
        self._outweighed = dict.fromkeys((reader.snapshot.step for reader, _ in self._snapshots), 0)
        self._came_back = 0

    def _scores(self, rows: Rows) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the scores of those of a block's samples that have enough visits, and which these are, bool [m]."""
        score = self._rules.score(rows).astype(np.float32)
        seen = ~self._rules.too_few_visits(rows) & np.isfinite(score)  # a damaged row may hold anything
        return score[seen], seen

    def ranks(self, block: range) -> NDArray[np.float32]:
        """Return each sample's mean rank by log s, summed over the sides; float32 [m].

        0 is the highest log s of samples that are not planted, 1 the lowest: ranks, since snapshots differ in scale.
        The mean is over the snapshots at which the sample had MIN_VISITS visits, among those that had; without any,
        inf. A snapshot that the run deletes meanwhile is left out from this block on, and noted. Raises
        DamagedChunkError.
        """
        total, times = np.zeros((2, len(block)))
        ever, outweighed = np.zeros((2, len(block)), np.bool_)
        planted = self._rules.are_planted(block)
        for reader, scores in list(self._snapshots):
            try:
                of, seen = self._scores(reader.rows(block.start, block.stop, self._columns))
            except SnapshotNotFoundError:
                self._snapshots.remove((reader, scores))
                self._notes.append(
                    f"{reader.snapshot.tag} is left out from sample {block.start:,} on: the run deleted "
                    "it while it was being read."
                )
                continue
            total[seen] += 1 - scores.ranks(of)
            times += seen
            outweighed = np.zeros(len(block), np.bool_)
            outweighed[seen] = of > 0
            outweighed &= ~planted
            self._outweighed[reader.snapshot.step] += int(outweighed.sum())
            ever |= outweighed
        self._came_back += int((ever & ~outweighed).sum())
        with np.errstate(invalid="ignore"):
            return np.where(times, total / np.maximum(times, 1), np.inf).astype(np.float32)

    def doubted(self) -> Doubted:
        """Return what `ranks` has met, once it was called for every block."""
        sizes = {reader.snapshot.step: scores.count for reader, scores in self._snapshots}
        return Doubted({step: self._outweighed[step] / size for step, size in sizes.items()}, self._came_back)
