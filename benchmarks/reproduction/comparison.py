"""Finished runs by what they are compared as, and how far two of them are apart, with its error.

Methods are compared sample by sample: the same test samples, the same seeds. The error of a difference has two parts
that are crossed, both by Student's t: of the seeds, and of the test samples, in clusters where they share a caption.
How seeds differ from sample to sample is in both, so it is taken off once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermopile.trainer.evaluation.bands import estimate

from .plan import BASELINES, Data, Method, Mode, Run, Settings, base_of, baseline_run, is_drawn, is_real
from .real_sets import HELD_OUT, REAL_BANDS
from .results import DECIDES, PROBE, Measure, Result, Results
from .schedule import FURTHER_SEEDS, SEEDS, headline, seeds_of, swept
from .sets import bands_of, captions_of, test_samples

ALL = "all"


class Estimate(NamedTuple):
    """A figure in points (hundredths of all), and the half width of its 95 % interval."""

    points: float
    noise: float


class Comparison:
    """What the results say, run by run; empty lists for runs that are not made."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def seeds(
        self, method: Method, *, data: Data | None = None, changed: Settings | None = None, seeds: Sequence[int] = ()
    ) -> list[Result]:
        """A method's runs, one for each seed; none before all are made."""
        return self.of_seeds(
            lambda seed: headline(method, self.results, seed, data=data, changed=changed), seeds or seeds_of(method)
        )

    def swept(self, name: str, batch: int) -> list[Result]:
        """A method's runs on images at a batch size."""
        return self.of_seeds(lambda seed: swept(name, batch, seed, self.results), SEEDS["unimodal"])

    def of_seeds(self, run: Callable[[int], Run | None], seeds: Sequence[int]) -> list[Result]:
        """The results of a run with each of these seeds, and with the further ones once all of them are made."""
        first = self.all(map(run, seeds))
        return [*first, *self.all(map(run, FURTHER_SEEDS))] if len(first) == len(SEEDS["unimodal"]) else first

    def baseline(self, mode: Mode, baseline: str, data: Data) -> Result | None:
        return self.results.of(baseline_run(mode, data, baseline))

    def all(self, runs: Iterable[Run | None]) -> list[Result]:
        """The results of these runs; none before all are made."""
        found = [self.results.of(run) if run else None for run in runs]
        made = [result for result in found if result is not None]
        return made if len(made) == len(found) else []

    def mean(self, runs: Sequence[Result], measure: Measure | None = None, band: str = ALL) -> Estimate | None:
        """The mean of a score over a method's runs, on these test samples; None without runs, the score, or the band.

        measure: that of the mode's verdicts where not given.
        """
        shares = self.right(runs, measure)
        if shares is None or not _has(band, runs[0].run.data):
            return None
        return in_points(shares[:, self._chosen(band, runs[0].run.data)], None)

    def gap(
        self, better: Sequence[Result], worse: Sequence[Result], measure: Measure | None = None, band: str = ALL
    ) -> Estimate | None:
        """How far `better` is above `worse`, seed by seed; one run stands for all seeds. None if one is not made."""
        high, low = (self.right(runs, measure) for runs in _alike(better, worse))
        if high is None or low is None or not _has(band, better[0].run.data):
            return None
        run = better[0].run
        return in_points((high - low)[:, self._chosen(band, run.data)], self._clusters(run.mode, band, run.data))

    def gain(self, first: Sequence[Sequence[Result]], second: Sequence[Sequence[Result]]) -> Estimate | None:
        """How much further apart the first two are than the second two, in the same test samples and seeds."""
        found = [self.right(runs, None) for runs in _alike(*first, *second)]
        if any(each is None for each in found):
            return None
        high, low, other_high, other_low = (each for each in found if each is not None)
        run = first[0][0].run
        values = (high - low - (other_high - other_low))[:, self._chosen(ALL, run.data)]
        return in_points(values, self._clusters(run.mode, ALL, run.data))

    def is_clear(self, runs: Sequence[Result], measure: Measure | None = None) -> bool:
        """Whether a method is above what nothing has trained, by more than the error.

        runs: at least one. Raw pixels have no score for pairs.
        """
        run = runs[0].run
        names = BASELINES[1:] if is_drawn(run.data) else BASELINES
        data = base_of(run.data).removesuffix("-all") if is_real(run.data) else run.data
        floors = [self.baseline(run.mode, name, data) for name in names]
        if None in floors:
            return False
        gaps = [self.gap(runs, [floor], measure) for floor in floors if floor]
        return all(gap.points > gap.noise for gap in gaps if gap) and any(gaps)

    def right(self, runs: Sequence[Result], measure: Measure | None = None) -> NDArray[np.float64] | None:
        """Return which test samples each run got right, 0 … 1, float64 [runs, m]; of several parts the mean."""
        measure = measure or (DECIDES[runs[0].run.mode] if runs else PROBE)
        found = [[self.results.right(result, part, self._samples(result.run.data)) for part in measure.parts]
                 for result in runs]  # fmt: skip
        if not found or any(part is None for parts in found for part in parts):
            return None
        right: NDArray[np.float64] = np.array(found, np.float64).mean(1)
        return right

    def _samples(self, data: Data) -> int:
        return len(self.results.tests(data)["band"]) if is_real(data) else test_samples(data)

    def _chosen(self, band: str, data: Data) -> NDArray[np.bool_] | slice:
        """Of icons all are those at random."""
        if is_real(data):
            of_sample = self.results.tests(data)["band"]
            return np.isin(of_sample, HELD_OUT if band == ALL else REAL_BANDS.index(band), invert=band == ALL)
        return slice(None) if band == ALL else bands_of(data) == REAL_BANDS.index(band)

    def _clusters(self, mode: Mode, band: str, data: Data) -> NDArray[np.int64] | None:
        """Pairs with the same caption have the same text features, and are right or wrong together."""
        if mode == "unimodal" or (is_drawn(data) and not is_real(data)):
            return None
        captions = self.results.tests(data)["caption"] if is_real(data) else captions_of(data)
        return captions[self._chosen(band, data)]


def _alike(*every: Sequence[Result]) -> list[Sequence[Result]]:
    """The same seeds of each method, as many as all have; a single run stands for all seeds."""
    count = min((len(runs) for runs in every if len(runs) != 1), default=1)
    return [runs[:count] for runs in every]


def _has(band: str, data: Data) -> bool:
    """Drawings are scored without their classes."""
    return band == ALL or is_real(data) or not is_drawn(data)


def in_points(values: NDArray[np.float64], clusters: NDArray[np.int64] | None) -> Estimate:
    """The mean of values of seeds and test samples, float64 [seeds, m], in points. clusters: each sample's, or None."""
    found = estimate(values, np.arange(values.shape[1]) if clusters is None else clusters)
    return Estimate(100 * found["mean"], 100 * found["half_width"])
