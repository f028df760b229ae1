"""Finished runs by what they are compared as, and how far two of them are apart, with its error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, variance
from typing import NamedTuple

from thermopile.pipeline.sources.glyphs import TEST_PER_CLASS, class_sizes
from thermopile.trainer.evaluation.bands import BANDS, band_of_class

from reproduction.plan import BASELINES, METHODS, SEEDS, Data, Length, Mode, Run, Settings, baseline_run
from reproduction.results import DECIDES, PROBE, Measure, Result, Results
from reproduction.schedule import best_headline, headline, optimized, swept

ALL = "all"
_CLASSES = Counter(band_of_class(class_sizes()).tolist())
TEST_SAMPLES = {band: TEST_PER_CLASS * _CLASSES[code] for code, band in enumerate(BANDS)}
TEST_SAMPLES[ALL] = sum(TEST_SAMPLES.values())


class Estimate(NamedTuple):
    """A figure in points (hundredths of all), and twice its standard error."""

    points: float
    noise: float

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two figures with independent errors."""
        return Estimate(self.points - other.points, math.hypot(self.noise, other.noise))


class Comparison:
    """What the results say, run by run; empty lists for runs that are not made."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._variances: dict[tuple[Mode, Measure, str], float] = {}

    def seeds(
        self, mode: Mode, label: str, *, data: Data = "long-tailed", changed: Settings | None = None,
        seeds: Sequence[int] = SEEDS,
    ) -> list[Result]:  # fmt: skip
        """A method's runs, one for each seed; none before all are made."""
        return self._all(headline(mode, label, self.results, seed=seed, data=data, changed=changed) for seed in seeds)

    def best(self, mode: Mode, name: str, *, data: Data = "long-tailed") -> list[Result]:
        """The same, of the form that the search prefers, where a method has several."""
        return self._all(best_headline(mode, name, self.results, seed=seed, data=data) for seed in SEEDS)

    def optimized(self, name: str) -> list[Result]:
        """FastCLIP-v3's runs with an optimiser, one for each seed."""
        return self._all(optimized(name, seed, self.results) for seed in SEEDS)

    def swept(self, name: str, batch: int, length: Length = "epochs") -> list[Result]:
        """A method's run on images at a batch size."""
        return self._all([swept(name, batch, length, self.results)])

    def baseline(self, mode: Mode, baseline: str, data: Data = "long-tailed") -> Result | None:
        return self.results.of(baseline_run(mode, data, baseline))

    def _all(self, runs: Iterable[Run | None]) -> list[Result]:
        found = [self.results.of(run) if run else None for run in runs]
        made = [result for result in found if result is not None]
        return made if len(made) == len(found) else []

    def mean(self, runs: Sequence[Result], measure: Measure | None = None, band: str = ALL) -> Estimate | None:
        """The mean of a score over the runs of a method; None where there are none with that score.

        measure: that of the mode's verdicts where not given. The error is of drawing the test samples, and of the
        seeds: their variance is pooled over the methods of the mode that have several, for three say little.
        """
        measure = measure or (DECIDES[runs[0].run.mode] if runs else PROBE)
        if not (shares := shares_of(runs, measure, band)):
            return None
        share = fmean(shares)
        of_seeds = self._variance(runs[0].run.mode, measure, band) / len(shares)
        return Estimate(100 * share, 200 * math.sqrt(of_seeds + _of_test(share, band)))

    def gap(
        self, better: Sequence[Result], worse: Sequence[Result], measure: Measure | None = None, band: str = ALL
    ) -> Estimate | None:
        """How far `better` is above `worse`; None where one was not made."""
        high, low = self.mean(better, measure, band), self.mean(worse, measure, band)
        return None if high is None or low is None else high.minus(low)

    def is_clear(self, runs: Sequence[Result], measure: Measure | None = None, data: Data = "long-tailed") -> bool:
        """Whether a method is above what nothing has trained, by more than the error.

        runs: at least one. Raw pixels have no score for pairs.
        """
        mode, measure = runs[0].run.mode, measure or DECIDES[runs[0].run.mode]
        floors = [self.baseline(mode, name, data) for name in BASELINES]
        reached = self.mean(runs, measure)
        if reached is None or None in floors:
            return False
        gaps = [reached.minus(Estimate(100 * share, 200 * math.sqrt(_of_test(share, ALL))))
                for share in shares_of([floor for floor in floors if floor], measure)]  # fmt: skip
        return all(gap.points > gap.noise for gap in gaps)

    def _variance(self, mode: Mode, measure: Measure, band: str) -> float:
        """Return the variance of a share over seeds, pooled over methods; 0 before any method has its seeds."""
        if (key := (mode, measure, band)) not in self._variances:
            of_methods = (self.seeds(mode, method.label) for method in METHODS if method.mode == mode)
            spreads = [variance(shares) for runs in of_methods if len(shares := shares_of(runs, measure, band)) > 1]
            self._variances[key] = fmean(spreads) if spreads else 0.0
        return self._variances[key]


def shares_of(runs: Sequence[Result], measure: Measure, band: str = ALL) -> list[float]:
    """Return the score of each run that has it; 0 for a training that failed."""
    found = (result.share(measure, band) for result in runs)
    return [share for share in found if share is not None]


def _of_test(share: float, band: str) -> float:
    """The variance of a share of the test samples."""
    return share * (1 - share) / TEST_SAMPLES[band]
