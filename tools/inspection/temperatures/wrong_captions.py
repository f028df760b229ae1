"""How many captions are wrong, told by those that the run planted: of a list of misfits, and of all.

A planted sample has a caption as wrong as another sample's, so the share F0 of these beyond a score says how many wrong
ones lie there, and the share F of all others how many samples do. Threshold samples of area under the margin (Pleiss et
al., NeurIPS 2020) do the like with labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...progress import OnTask
from ..json_fields import Hidden, Shown
from ..reading.opening import Inspection
from ..reading.state_blocks import Rows, read_blocks
from .distribution import Distribution
from .kinds import KindRules
from .whole_run import WholeRun

LEAST_PLANTED = 200
"""Fewer planted samples give no number."""
LEAST_IN_TAIL, LEAST_BEYOND = 30, 5
"""Planted samples beyond a score that says how many captions are wrong, and beyond the end of a list to judge it."""
HALF = 0.5
"""Expected precision down to which a list of misfits is worth dropping."""
LISTS = tuple(first * 10**power for power in range(2, 9) for first in (1, 2, 5))
LEVEL = 0.9
_DRAWS, _MOST_BINS, _SEED = 500, 1000, 2031


Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """An estimate with an interval at LEVEL."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class WrongCaptions:
    """What planted samples say of the others, ordered by a score, the most suspicious first."""

    planted: int
    others: int
    share: Interval
    """Share of the others whose caption is as wrong as another sample's, 0 … 1; others may be wrong in part."""
    lists: Annotated[
        dict[int, Interval],
        Shown(lambda lists: {str(first): of._asdict() for first, of in lists.items()}),
    ]
    """Number of samples from the first on -> how many of their captions are wrong."""
    beyond: Hidden[NDArray[np.int64]]
    """int64 [planted], ascending: how many of the others are as suspicious as each planted one, or more."""

    def precision(self, first: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the expected share of wrong captions among the first samples, float64 [m], 0 … 1.

        first: numbers of samples, int64 [m], at least 1. NaN where fewer than LEAST_BEYOND planted lie beyond the last.
        """
        planted = np.searchsorted(self.beyond, first, "right")
        found = _precision(self.share.value, planted / self.planted, first / self.others)
        return np.where(planted < LEAST_BEYOND, np.nan, found)

    def longest(self, precision: float) -> int:
        """Return the number of samples of the longest list that has this expected precision; 0 if none has."""
        lists = np.unique(np.maximum(self.beyond, 1))  # beyond these the precision only falls, up to the next
        return int(lists[self.precision(lists) >= precision].max(initial=0))


def wrong_captions(beyond: NDArray[np.int64], others: int) -> WrongCaptions | None:
    """Judge `others` samples by the planted ones; None if these are too few.

    beyond: int64 [planted], in any order: how many of the others are as suspicious as each, or more. The share of wrong
    captions is the least F / F0 over the tail, the expected precision of a list the share times F0 / F at its end. The
    intervals are of a bootstrap over both groups.
    """
    beyond, planted = np.sort(beyond), len(beyond)
    if planted < LEAST_PLANTED or not others:
        return None
    rng, places = np.random.default_rng(_SEED), np.unique(np.linspace(1, planted, min(planted, _MOST_BINS)).astype(int))
    lists = np.array([first for first in LISTS if first < others])
    counts = np.stack([  # of planted, and of others, up to each planted one and to the end of each list
        np.concatenate([places, np.searchsorted(beyond, lists, "right"), [planted]]),
        np.concatenate([beyond[places - 1], lists, [others]]),
    ])  # fmt: skip
    counts = counts[:, np.lexsort(counts)]
    steps = np.diff(counts, prepend=0)
    of_planted, of_others = (
        np.cumsum(rng.multinomial(total, step / total, _DRAWS), axis=1)
        for total, step in zip((planted, others), steps, strict=True)
    )
    f0 = np.concatenate([counts[:1], of_planted]) / planted
    f = np.concatenate([counts[1:], of_others]) / others
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(f0 * planted >= LEAST_IN_TAIL - 0.5, f / f0, 1).min(1).clip(0, 1)
    ends = np.searchsorted(counts[1], lists, "right") - 1
    wrong = np.array([_precision(share, f0[:, end], np.maximum(f[:, end], 1 / others)) for end in ends])
    judged = counts[0][ends] >= LEAST_BEYOND
    found = {first: _interval(of * first) for first, of in zip(lists[judged].tolist(), wrong[judged], strict=True)}
    return WrongCaptions(planted, others, _interval(share), found, beyond)


def _precision(share: Floats | float, f0: Floats, f: Floats) -> Floats:
    return np.minimum(1.0, share * f0 / f)


def _interval(draws: NDArray[np.float64]) -> Interval:
    """Return the first as the value, with the interval of the others, widened to hold it."""
    low, high = np.quantile(draws[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(*map(float, (draws[0], min(low, draws[0]), max(high, draws[0]))))


@dataclass(frozen=True)
class Misfits:
    """All samples of a run that can be ordered, the most suspicious first."""

    sample_ids: NDArray[np.int64]
    """int64 [m]: all but planted and stuck samples and those with too few visits."""
    ranks: NDArray[np.int64]
    """int64 [n]: of each sample of the dataset, from 1; 0 for those not in the order."""
    wrong: WrongCaptions | None

    def columns(self, block: range) -> tuple[pa.Array, pa.Array]:
        """Return ranks and expected precisions of samples; null where there is none."""
        ranks = self.ranks[block.start : block.stop]
        precision = np.full(len(block), np.nan)
        if self.wrong:
            precision[ranks > 0] = self.wrong.precision(ranks[ranks > 0])
        return pa.array(ranks, mask=ranks == 0), pa.array(precision, pa.float32(), from_pandas=True)

    @classmethod
    def read(cls, inspection: Inspection, on_progress: OnTask) -> Self:
        """Read all snapshots; takes 20 bytes of memory for each sample. Raises as `WholeRun`."""
        reader, rules = inspection.reader, KindRules.of(inspection)
        assert reader is not None
        over_run, order = WholeRun(inspection, partial(on_progress, "reading all snapshots")), MisfitOrder(rules)
        scores = np.full(reader.samples, np.inf, np.float32)
        for block, rows in read_blocks(reader, rules.columns):
            of_block = over_run.ranks(block)
            ordered = order.add(block, rows, reader.is_kept(block.start, block.stop), of_block)
            scores[block.start : block.stop] = np.where(ordered, of_block, np.inf)
            on_progress("ordering misfits", block.stop, reader.samples)
        found, ranks = np.argsort(scores, kind="stable")[: np.isfinite(scores).sum()], np.zeros(len(scores), np.int64)
        ranks[found] = np.arange(1, len(found) + 1)
        return cls(found, ranks, order.judged())


class MisfitOrder:
    """The samples by log s over the run, block by block; memory does not grow with the samples."""

    def __init__(self, rules: KindRules) -> None:
        self._rules, self._others, self._planted = rules, Distribution(), [np.empty(0, np.float32)]

    def add(self, block: range, rows: Rows, kept: NDArray[np.bool_], ranks: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Add a block and return which of its samples are in the order, bool [m].

        rows: the rules' columns. kept: bool [m], those that the run trains on. ranks: float32 [m], as `WholeRun.ranks`.
        """
        usable = kept & ~self._rules.too_few_visits(rows) & ~self._rules.is_stuck(rows) & np.isfinite(ranks)
        is_planted = self._rules.are_planted(block)
        self._planted.append(ranks[usable & is_planted])
        self._others.add(ranks[usable & ~is_planted])
        return usable & ~is_planted

    def judged(self) -> WrongCaptions | None:
        """Judge the samples of all blocks by the planted ones; None if these are too few."""
        planted, others = np.concatenate(self._planted), self._others.count
        return wrong_captions(np.rint(self._others.ranks(planted) * others).astype(int), others) if others else None
