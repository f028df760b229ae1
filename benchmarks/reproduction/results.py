"""What the runs of a comparison scored, and how far two methods are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any, NamedTuple

from reproduction.plan import Mode, Run

BANDS = ("all", "head", "medium", "tail")


class Measure(NamedTuple):
    """A score, by its place in `thermopile eval --json`."""

    label: str
    parts: tuple[tuple[str, str], ...]
    """Method and variant; of several the mean."""


LINEAR = Measure("linear probe, L-BFGS", (("probe", "lbfgs"),))
KNN = Measure("k-NN, k = 10", (("knn", "10"),))
RETRIEVAL = Measure("R@1, mean of both ways", (("image_to_text", "1"), ("text_to_image", "1")))
ZERO_SHOT = Measure("zero-shot", (("zero_shot", "top1"),))
MEASURES = (
    KNN,
    Measure("k-NN, k = 20", (("knn", "20"),)),
    LINEAR,
    Measure("linear probe, SGD", (("probe", "sgd"),)),
    *(Measure(f"image to text, R@{k}", (("image_to_text", k),)) for k in ("1", "5", "10")),
    *(Measure(f"text to image, R@{k}", (("text_to_image", k),)) for k in ("1", "5", "10")),
    ZERO_SHOT,
)
"""In the order of the page's tables."""


class Temperatures(NamedTuple):
    """Figures of one side's samples."""

    mean: float
    skewness: float
    """0 for a normal distribution, above 0 for a long tail of high temperatures."""
    spearman: float | None
    """Correlation of class size and the class's mean tau; None where there is nothing to rank."""
    permuted: float | None
    """The same with the samples' classes permuted."""


class Result(NamedTuple):
    """What one run came to."""

    run: Run
    scores: dict[str, dict[str, dict[str, float | None]]]
    """As in `thermopile eval --json`: method, variant, band → share of 1."""
    classes_of_band: dict[str, int]
    test_samples: int
    temperatures: dict[str, Temperatures]
    """By side, `image` and `text`, or `sample`; empty where no sample has a temperature of its own."""
    samples: int
    """Number of training samples."""
    seconds: float | None
    """Training time in seconds; None if training was interrupted."""
    machine: dict[str, Any]

    def share(self, measure: Measure, band: str = "all") -> float | None:
        """Share of correct test samples; None if not scored."""
        found = [self.scores.get(method, {}).get(variant, {}).get(band) for method, variant in measure.parts]
        known = [share for share in found if share is not None]
        return fmean(known) if len(known) == len(found) else None


class Estimate(NamedTuple):
    """A figure in points (hundredths of all), and twice its standard error."""

    points: float
    noise: float


@dataclass(frozen=True)
class Results:
    """All runs of a comparison."""

    every: list[Result]

    def of(self, mode: Mode, method: str, batch_size: int) -> list[Result]:
        """A method's runs, one for each seed."""
        return [r for r in self.every if (r.run.method.mode, r.run.method.name, r.run.batch_size)
                == (mode, method, batch_size)]  # fmt: skip

    def shares(self, mode: Mode, method: str, batch_size: int, measure: Measure, band: str = "all") -> list[float]:
        """A method's scores, one for each seed; empty where there are none."""
        found = (result.share(measure, band) for result in self.of(mode, method, batch_size))
        return [share for share in found if share is not None]

    def batch_sizes(self, mode: Mode) -> list[int]:
        return sorted({result.run.batch_size for result in self.every if result.run.method.mode == mode})

    def methods(self, mode: Mode) -> list[str]:
        """In the order in which they were compared."""
        return list(dict.fromkeys(r.run.method.name for r in self.every if r.run.method.mode == mode))

    def mean(self, mode: Mode, method: str, batch_size: int, measure: Measure) -> Estimate | None:
        """A method's mean over its seeds, in points, and twice its standard error; None where it was not scored.

        The error is of drawing the test samples, and of the seeds: their variance is pooled over the methods of the
        mode, for two or three seeds of one method say little. With one seed there is none to be seen.
        """
        if not (shares := self.shares(mode, method, batch_size, measure)):
            return None
        share = fmean(shares)
        spread = [variance(own) for name in self.methods(mode)
                  if len(own := self.shares(mode, name, batch_size, measure)) > 1]  # fmt: skip
        of_seeds = fmean(spread) / len(shares) if spread else 0.0
        of_test = share * (1 - share) / self.every[0].test_samples
        return Estimate(100 * share, 200 * math.sqrt(of_seeds + of_test))

    def gap(self, mode: Mode, better: str, worse: str, batch_size: int, measure: Measure) -> Estimate | None:
        """How far `better` is above `worse`; None where one was not scored."""
        high, low = self.mean(mode, better, batch_size, measure), self.mean(mode, worse, batch_size, measure)
        return None if high is None or low is None else difference(high, low)


def difference(high: Estimate, low: Estimate) -> Estimate:
    """Return the difference of two figures with independent errors."""
    return Estimate(high.points - low.points, math.hypot(high.noise, low.noise))
