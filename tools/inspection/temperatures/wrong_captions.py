"""Estimate the number of wrong captions from planted ones, in a list of misfits and in all.

A planted sample has a caption as wrong as another sample's. So the share F0 of these beyond a score says how many wrong
ones lie there, and the share F of all others how many samples do. Threshold samples of area under the margin (Pleiss et
al., NeurIPS 2020) do the like with labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .. import OnTask
from ..json_fields import Hidden
from ..opening import Inspection, read_blocks
from .kinds import KindRules
from .whole_run import WholeRun

LEAST_PLANTED, LEAST_IN_TAIL, LEAST_BEYOND = 200, 30, 5
"""Planted samples for any number, beyond a score that tells the share of wrong captions, beyond the end of a list."""
HALF = 0.5
"""Expected precision down to which a list of misfits is worth dropping."""
LISTS = [first * 10**power for power in range(2, 9) for first in (1, 2, 5)]
LEVEL, _DRAWS, _MOST_BINS, _SEED = 0.9, 500, 1000, 2031
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class WrongCaptions:
    """Estimates from planted samples, for the others in order of suspicion. Estimates have an interval at LEVEL."""

    planted: int
    others: int
    share: tuple[float, float, float]
    """Of the others, 0 … 1, whose caption is as wrong as another sample's; more may be wrong in part."""
    lists: dict[int, tuple[float, float, float]]
    """Number of samples from the first on -> how many of their captions are wrong."""
    precision: Hidden[NDArray[np.float64]]
    """float64 [others]: the expected share of wrong captions up to each; NaN with fewer than LEAST_BEYOND planted."""

    def longest(self, precision: float) -> int:
        """Return the number of samples of the longest list that has this expected precision; 0 if none has."""
        return int(np.flatnonzero(self.precision >= precision).max(initial=-1)) + 1


def wrong_captions(beyond: Ids, others: int) -> WrongCaptions | None:
    """Judge `others` samples by the planted ones; None if these are too few.

    beyond: int64 [planted]: how many of the others are as suspicious as each, or more. The share is the least F / F0
    over the tail, the expected precision of a list the share times F0 / F at its end; the intervals are of a bootstrap
    over both groups.
    """
    beyond, planted = np.sort(beyond), len(beyond)
    if planted < LEAST_PLANTED or not others:
        return None
    places = np.unique(np.linspace(1, planted, min(planted, _MOST_BINS)).astype(int))
    inside = np.searchsorted(beyond, np.arange(1, others + 1), "right")
    lists = np.array([first for first in LISTS if first < others and inside[first - 1] >= LEAST_BEYOND], np.int64)
    ends = np.stack([np.append(places, inside[lists - 1]), np.append(beyond[places - 1], lists)])
    ends = np.append(ends[:, np.lexsort(ends)], [[planted], [others]], axis=1)  # of planted, and of others
    rng, shares = np.random.default_rng(_SEED), list[NDArray[np.float64]]()
    for total, of_group in zip((planted, others), ends, strict=True):
        drawn = rng.multinomial(total, np.diff(of_group, prepend=0) / total, _DRAWS).cumsum(1)
        shares.append(np.concatenate([of_group[None], drawn]) / total)
    f0, f = shares
    with np.errstate(divide="ignore", invalid="ignore"):  # the least of many ratios: by chance too low, if anything
        share = np.min(f / f0, axis=1, where=f0 * planted > LEAST_IN_TAIL - 0.5, initial=1)
    at = np.searchsorted(ends[1], lists, "right") - 1
    wrong = np.minimum(1, share[:, None] * f0[:, at] / np.maximum(f[:, at], 1 / others)) * lists
    draws = np.column_stack([share, wrong])
    low, high = np.quantile(draws[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    bounds = draws[0], np.minimum(low, draws[0]), np.maximum(high, draws[0])
    of_all, *of_lists = zip(*(each.tolist() for each in bounds), strict=True)
    precision = np.minimum(1, share[0] * (inside / planted) / (np.arange(1, others + 1) / others))
    precision[inside < LEAST_BEYOND] = np.nan
    return WrongCaptions(planted, others, of_all, dict(zip(lists.tolist(), of_lists, strict=True)), precision)


def misfits(inspection: Inspection, on_progress: OnTask) -> tuple[Ids, WrongCaptions | None]:
    """Return all samples but planted and stuck ones and those with too few visits, by log s over the run, the highest
    first, int64 [m], and the estimate from planted ones. Takes 12 bytes of memory a sample. Raises as `WholeRun`."""
    reader, rules = inspection.reader, KindRules.of(inspection)
    assert reader is not None
    over_run = WholeRun(inspection, partial(on_progress, "reading all snapshots"))
    scores = np.full(reader.samples, np.inf, np.float32)
    for block, rows in read_blocks(reader, rules.columns):
        usable = reader.is_kept(block.start, block.stop) & ~rules.too_few_visits(rows) & ~rules.is_stuck(rows)
        scores[block.start : block.stop] = np.where(usable, over_run.ranks(block), np.inf)
        on_progress("ordering misfits", block.stop, reader.samples)
    planted, scores[rules.planted] = scores[rules.planted], np.inf
    ids = np.argsort(scores, kind="stable")[: np.isfinite(scores).sum()]
    beyond = np.searchsorted(scores[ids], planted[np.isfinite(planted)], "right")
    return ids, wrong_captions(beyond, len(ids))


def exported(order: Ids, wrong: WrongCaptions | None, inspection: Inspection, samples: int) -> pa.Table:
    """Return a row for each sample, null where it has none: misfit_rank, int64 from 1; expected_precision, float32, the
    share of wrong captions up to it; planted, int64, the sample whose caption it was trained with."""
    ranks, precision, shown = np.zeros(samples, np.int64), np.full(samples, np.nan, np.float32), np.full(samples, -1)
    ranks[order], precision[order] = np.arange(1, len(order) + 1), wrong.precision if wrong else np.nan
    shown[inspection.planted[0]] = inspection.planted[1]
    columns = [pa.array(ranks, mask=ranks == 0), pa.array(precision, from_pandas=True), pa.array(shown, mask=shown < 0)]
    return pa.table(columns, ["misfit_rank", "expected_precision", "planted"])
