"""Order samples by log s over a run's snapshots, and estimate the number of wrong captions from planted ones.

Over the whole run, since misfits that the model has learnt by heart since were high earlier. A planted sample has a
caption as wrong as another sample's. So the share F0 of these beyond a score says how many wrong ones lie there, and
the share F of all others how many samples do. Threshold samples of area under the margin (Pleiss et al., NeurIPS 2020)
do the like with labels.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np
import pyarrow as pa

from ....state_store.durable import list_snapshots
from ....state_store.errors import SnapshotNotFoundError
from ....state_store.reader import StateReader
from ....state_store.schema import VISITS
from ....trainer.config import RANDOM
from .. import Bools, Float32s, Float64s, Hidden, Int64s, OnDone, OnTask, silent
from ..opening import Inspection, Rows, read_blocks
from .distribution import Distribution
from .kinds import KindRules
from .through_time import read_every_snapshot

MAX_SNAPSHOTS = 16
"""Of more, one in two is read, or one in three and so on, the last among them."""
LEAST_PLANTED, LEAST_IN_TAIL, LEAST_BEYOND = 200, 30, 5
"""Planted samples for any number, beyond a score that tells the share of wrong captions, beyond the end of a list."""
TAIL = 0.08
"""Share of the planted samples that must lie beyond such a score, too: with thousands of them, the least ratio would be
that of a few others, far too low by chance."""
MAX_LISTS, MAX_PLANTED = 4, 0.1
"""Lists that sentences name, and share of the samples to plant."""
HALF = 0.5
"""Expected precision down to which a list of misfits is worth dropping, and share of temperatures that are most."""
LISTS = [first * 10**power for power in range(2, 9) for first in (1, 2, 5)]
LEVEL, _DRAWS, _MOST_BINS, _SEED = 0.9, 500, 1000, 2031
WIDER = 1.75
"""Half-width of an interval, times that of the bootstrap, which knows of chance alone: real wrong captions are of other
kinds than planted ones. The least by which four of five true numbers lay inside, by margin, on emoji and icons with
exchanged captions (`benchmarks.kinds --wrong`)."""
WIDE, TIMES = 0.4, 4
"""Nothing is said of a list whose interval is wider than this share of it and whose upper end is more than this many
times the lower: of 38,000 icons, many of which look like others with other names, 42 (10 to 100) of the first 100 were
expected to be wrong, and 3 are."""


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

    def __init__(self, inspection: Inspection, on_progress: OnDone = silent):
        """Read every row once; there must be a snapshot. Calls on_progress with the rows read.

        A snapshot that is damaged, or that the run deletes meanwhile, is left out and noted.
        """
        self._rules, last = KindRules.of(inspection), inspection.state.snapshot.step
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

        self._snapshots = [found for found in read_every_snapshot(inspection, read, silent) if found and found[1].count]
        self._outweighed = dict.fromkeys((reader.snapshot.step for reader, _ in self._snapshots), 0)
        self._came_back = 0

    def _scores(self, rows: Rows) -> tuple[Float32s, Bools]:
        """Return the scores of those of a block's samples that have enough visits, and which these are, bool [m]."""
        score = self._rules.score(rows).astype(np.float32)
        seen = ~self._rules.too_few_visits(rows) & np.isfinite(score)  # a damaged row may hold anything
        return score[seen], seen

    def ranks(self, block: range) -> Float32s:
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
                left_out = f"{reader.snapshot.tag} is left out from sample {block.start:,} on"
                self._notes.append(f"{left_out}: the run deleted it while it was being read.")
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


@dataclass(frozen=True)
class WrongCaptions:
    """Estimates from planted samples, for the others in order of suspicion. Estimates have an interval at LEVEL."""

    planted: int
    others: int
    share: tuple[float, float, float]
    """Of the others, 0 … 1, whose caption is as wrong as another sample's; more may be wrong in part."""
    lists: dict[int, tuple[float, float, float]]
    """Number of samples from the first on -> how many of their captions are wrong, where enough is known."""
    precision: Hidden[Float64s]
    """float64 [others]: the expected share of wrong captions up to each; NaN with fewer than LEAST_BEYOND planted, and
    in all lists before the first of which enough is known."""

    def longest(self, precision: float) -> int:
        """Return the number of samples of the longest list that has this expected precision; 0 if none has."""
        return int(np.flatnonzero(self.precision >= precision).max(initial=-1)) + 1


def is_known(first: int, low: float, high: float) -> bool:
    """Return whether an interval of a list's wrong captions says enough."""
    return high - low <= WIDE * first or high <= TIMES * low


def wrong_captions(beyond: Int64s, others: int) -> WrongCaptions | None:
    """Judge `others` samples by the planted ones; None if these are too few.

    beyond: int64 [planted]: how many of the others are as suspicious as each, or more. The share is the least F / F0
    over the tail, the expected precision of a list the share times F0 / F at its end; the intervals are those of a
    bootstrap over both groups, WIDER.
    """
    beyond, planted = np.sort(beyond), len(beyond)
    if planted < LEAST_PLANTED or not others:
        return None
    places = np.unique(np.linspace(1, planted, min(planted, _MOST_BINS)).astype(int))
    inside = np.searchsorted(beyond, np.arange(1, others + 1), "right")
    lists = np.array([first for first in LISTS if first < others and inside[first - 1] >= LEAST_BEYOND], np.int64)
    ends = np.stack([np.append(places, inside[lists - 1]), np.append(beyond[places - 1], lists)])
    ends = np.append(ends[:, np.lexsort(ends)], [[planted], [others]], axis=1)  # of planted, and of others
    rng, shares = np.random.default_rng(_SEED), list[Float64s]()
    for total, of_group in zip((planted, others), ends, strict=True):
        drawn = rng.multinomial(total, np.diff(of_group, prepend=0) / total, _DRAWS).cumsum(1)
        shares.append(np.concatenate([of_group[None], drawn]) / total)
    f0, f = shares
    counted = min(planted, others * MAX_PLANTED / (1 - MAX_PLANTED))  # of more, 30 would lie beyond hardly any other
    with np.errstate(divide="ignore", invalid="ignore"):  # the least of many ratios: by chance too low, if anything
        is_tail = f0 * counted > max(LEAST_IN_TAIL, TAIL * counted) - 0.5
        share = np.min(f / f0, axis=1, where=is_tail, initial=1)
    at = np.searchsorted(ends[1], lists, "right") - 1
    wrong = np.minimum(1, share[:, None] * f0[:, at] / np.maximum(f[:, at], 1 / others)) * lists
    draws = np.column_stack([share, wrong])
    low, high = np.quantile(draws[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    found, largest = draws[0], np.append(1, lists)
    below, above = (WIDER * np.maximum(each, 0) for each in (found - low, high - found))
    bounds = found, np.maximum(found - below, 0), np.minimum(found + above, largest)
    of_all, *of_lists = zip(*(each.tolist() for each in bounds), strict=True)
    told = dict(zip(lists.tolist(), of_lists, strict=True))
    known = {first: of for first, of in told.items() if is_known(first, of[1], of[2])}
    precision = np.minimum(1, share[0] * (inside / planted) / (np.arange(1, others + 1) / others))
    precision[inside < LEAST_BEYOND] = np.nan
    precision[: max(takewhile(lambda first: first not in known, told), default=0)] = np.nan
    return WrongCaptions(planted, others, of_all, known, precision)


def read_scores(inspection: Inspection) -> tuple[Inspection, Float32s]:
    """Return also how badly each sample fits, float32 [n]: the sum of log s over the sides; inf with too few visits.

    0 without log s; none, float32 [0], without a snapshot. Raises DamagedChunkError, SnapshotNotFoundError.
    """
    scores = [np.empty(0, np.float32)]
    if inspection.reader is not None:
        rules = KindRules.of(inspection)
        for block, all_rows in read_blocks(inspection.reader, [VISITS, *(f"{side}/log_s" for side in rules.log_s)]):
            rows = rules.judged(all_rows, block)
            scores.append(np.where(rows[VISITS] < rules.least_visits, np.inf, rules.score(rows)).astype(np.float32))
    return inspection, np.concatenate(scores)


def misfits(inspection: Inspection, on_progress: OnTask) -> tuple[Int64s, WrongCaptions | None, bool]:
    """Return all samples but planted and stuck ones and those with too few visits, by log s over the run, the highest
    first, int64 [m], and the estimate from planted ones; of a model that is not trained, by log s, and from random
    pairs, one for each sample. Takes 16 bytes of memory a sample. Raises as `WholeRun`.

    The third is whether, on a side, most visited samples have their temperature at tau_min; then there is no estimate.
    There a pair that the model has not learnt weighs like one that is wrong: of 39,200 icons with the names that their
    designers gave them, 100 of the first 100 were said to be wrong, and 18 once the temperatures could move.
    """
    reader, rules = inspection.state, KindRules.of(inspection)
    random = [RANDOM] if RANDOM in reader.fields else []
    over_run = None if random else WholeRun(inspection, partial(on_progress, "reading all snapshots"))
    scores, planted = np.full((2, reader.samples), np.inf, np.float32)
    visited, at_floor = 0, dict.fromkeys(rules.u, 0)
    for block, rows in read_blocks(reader, rules.columns + random):
        here, seen = slice(block.start, block.stop), rows[VISITS] > 0
        usable = reader.is_kept(block.start, block.stop) & ~rules.too_few_visits(rows) & ~rules.is_stuck(rows)
        scores[here] = np.where(usable, over_run.ranks(block) if over_run else -rules.score(rows), np.inf)
        planted[here] = np.where(usable, -rows[RANDOM], np.inf) if random else np.inf
        visited += int(seen.sum())
        for side in at_floor:
            at_floor[side] += int((rows[f"{side}/tau"][seen] <= rules.floor).sum())
        on_progress("ordering misfits", block.stop, reader.samples)
    if not random:
        planted, scores[rules.planted] = scores[rules.planted], np.inf
    ids = np.argsort(scores, kind="stable")[: np.isfinite(scores).sum()]
    beyond = np.searchsorted(scores[ids], planted[np.isfinite(planted)], "right")
    mostly = max(at_floor.values(), default=0) > HALF * visited
    return ids, None if mostly else wrong_captions(beyond, len(ids)), mostly


def misfit_sentences(inspection: Inspection, found: WrongCaptions | None, at_tau_min: bool) -> list[str]:
    """Return sentences about what `misfits` found: the number of wrong captions, or how to measure it."""
    if found is not None:
        lists = [
            f"of the first {n:,}, about {_rounded(map(round, of))}" for n, of in [*found.lists.items()][:MAX_LISTS]
        ]
        of_all = f"About {_rounded(100 * each for each in found.share)}% of captions are as wrong as another sample's"
        of_lists = [f"Wrong captions in the order of log s over the run: {'; '.join(lists)}."] if lists else []
        return [*of_lists, f"{of_all}; those that are wrong in part come on top."]
    if inspection.config.objective.mode != "bimodal":
        return ["This is an order, not a verdict: there are no captions that could be wrong."]
    pairs, planted = inspection.reader.kept if inspection.reader else 1, len(inspection.planted[0])
    why = "This is an order; the number of wrong captions is unknown"
    if planted >= LEAST_PLANTED and at_tau_min:
        return [f"{why}: most temperatures are at tau_min, where right pairs may look as wrong."]
    share = math.ceil(125 * LEAST_PLANTED / pairs) / 100
    if planted >= LEAST_PLANTED or share > MAX_PLANTED:
        return [f"{why}{': planted samples have too few visits yet' if planted >= LEAST_PLANTED else ''}."]
    few = f": {planted:,} are planted, {LEAST_PLANTED} are needed" if planted else ""
    return [f"{why}{few}. To measure it, train with --set data.planted={share:g}."]


def _rounded(interval: Iterable[float]) -> str:
    return "{} ({} to {})".format(*(f"{float(f'{each:.2g}'):,g}" for each in interval))


def exported(order: Int64s, wrong: WrongCaptions | None, inspection: Inspection, samples: int) -> pa.Table:
    """Return a row for each sample, null where it has none: misfit_rank, int64 from 1; expected_precision, float32, the
    share of wrong captions up to it; planted, int64, the sample whose caption it was trained with."""
    ranks, precision, shown = np.zeros(samples, np.int64), np.full(samples, np.nan, np.float32), np.full(samples, -1)
    ranks[order], precision[order] = np.arange(1, len(order) + 1), wrong.precision if wrong else np.nan
    shown[inspection.planted[0]] = inspection.planted[1]
    columns = [pa.array(ranks, mask=ranks == 0), pa.array(precision, from_pandas=True), pa.array(shown, mask=shown < 0)]
    return pa.table(columns, ["misfit_rank", "expected_precision", "planted"])
