"""The classes of the training set, in bands by frequency: head, medium, tail; scores by band, and their errors."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...storage.arrays import Bools, Float64s, Int64s

BANDS = ("head", "medium", "tail")
"""Thirds of the classes, not of the samples: classes sorted by number of training samples, largest first."""
NONE = -1
"""Code of a sample without a class, and of its band."""

Scores = dict[str, float | None]
"""Accuracy 0 … 1, for `all` samples and for each band; None without samples."""


@dataclass(frozen=True)
class Classes:
    """The classes of the training set, and the class of each sample."""

    names: list[str]
    """In code order."""
    train: Int64s
    """int64 [n]: codes of the training samples, NONE for a sample without a class."""
    test: Int64s
    """int64 [m]: codes of the test samples, NONE also for a class that no training sample has."""
    unknown: dict[str, int]
    """Test samples of each class that no training sample has."""

    @property
    def sizes(self) -> Int64s:
        """Return the number of training samples per class, int64 [classes]."""
        return np.bincount(self.train[self.train != NONE], minlength=len(self.names)).astype(np.int64)

    @property
    def test_bands(self) -> Int64s:
        """Return the index in BANDS of each test sample's class, or NONE; int64 [m]."""
        return np.append(band_of_class(self.sizes), NONE)[self.test]  # the code NONE, -1, selects the last element


def match_classes(train: pa.ChunkedArray, test: pa.ChunkedArray) -> Classes:
    """Match the class-name columns of two datasets by name; null means no class."""
    names = sorted(train.unique().drop_null().to_pylist())
    known = pa.array(names, train.type)
    of_train, of_test = (pc.index_in(of, known).fill_null(NONE).to_numpy().astype(np.int64) for of in (train, test))
    unknown = Counter(test.filter(pa.array(of_test == NONE)).drop_null().to_pylist())
    return Classes(names, of_train, of_test, dict(sorted(unknown.items())))


def band_of_class(sizes: Int64s) -> Int64s:
    """Return each class's index in BANDS, int64 [classes], given its number of training samples, int64 [classes].

    If three does not divide the number of classes, head and then medium get one more. Equal sizes are in code order.
    """
    bands = np.empty(len(sizes), np.int64)
    largest_first = np.argsort(-sizes, kind="stable")
    for band, classes in enumerate(np.array_split(largest_first, len(BANDS))):
        bands[classes] = band
    return bands


def score(right: NDArray[np.bool_ | np.float64], bands: Int64s) -> Scores:
    """Return the mean of `right`, bool or float64 [m], overall and per band; bands: int64 [m]."""
    parts = {"all": right} | {name: right[bands == band] for band, name in enumerate(BANDS)}
    return {name: float(part.mean()) if len(part) else None for name, part in parts.items()}


def half_widths(right: Bools, bands: Int64s) -> Scores:
    """Return half the 95 % interval of each mean over several draws, as `estimate`; right: bool [draws, m].

    bands: int64 [m]. None with fewer than two samples.
    """
    parts = {"all": right} | {name: right[:, bands == band] for band, name in enumerate(BANDS)}
    return {
        name: estimate(part.astype(np.float64), np.arange(part.shape[1]))["half_width"] if part.shape[1] > 1 else None
        for name, part in parts.items()
    }


def estimate(values: Float64s, clusters: Int64s) -> dict[str, float]:
    """Return the mean of values, float64 [seeds, m], its standard errors and `half_width`, half its 95 % interval.

    clusters: int64 [m], at least two, of samples that go together. `error` is of both seeds and samples; of one seed,
    seed_error is 0. The interval is by Student's t, of seeds − 1 and of clusters − 1 degrees of freedom.
    Variance = that of the seeds' means / seeds + that of the sums over clusters, whose samples may depend on each other
    in any way, − that of single seeds in single clusters, which is in both.
    Sources: Liang and Zeger (Biometrika 1986) for clusters, times count / (count − 1); Cameron, Gelbach and Miller
    (Journal of Business & Economic Statistics 2011) for two ways.
    """
    from scipy.special import stdtrit

    seeds, samples = values.shape
    mean, clusters = values.mean(), np.unique(clusters, return_inverse=True)[1]
    of_seed, of_sample = values.mean(1) - mean, values.mean(0) - mean
    both = np.stack([np.bincount(clusters, row) for row in values - mean - of_seed[:, None] - of_sample]) / samples
    of_cluster = np.bincount(clusters, of_sample) / samples
    count, twice = len(of_cluster), (both**2).sum() / max(1, seeds * (seeds - 1))
    by_seed = math.sqrt(of_seed.var() / max(1, seeds - 1))
    by_sample = math.sqrt(max(0.0, (of_cluster**2).sum() - twice) * count / (count - 1))
    half_width = math.hypot(stdtrit(max(1, seeds - 1), 0.975) * by_seed, stdtrit(count - 1, 0.975) * by_sample)
    errors = {"seed_error": by_seed, "sample_error": by_sample, "error": math.hypot(by_seed, by_sample)}
    return {"mean": float(mean), **errors, "half_width": half_width}
