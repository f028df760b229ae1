"""How far apart the scores of two runs are on the same test samples, and the standard errors of that."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...pipeline.dataset import Dataset
from .evaluate import Evaluation, all_captions

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean over seeds and test samples, with the standard errors of either; NaN where there are too few to tell."""

    mean: float
    seed_error: float
    """0 of one seed, of which nothing can be said."""
    sample_error: float
    seeds: int

    @property
    def error(self) -> float:
        """The standard error from both."""
        return math.hypot(self.seed_error, self.sample_error)

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval: Student's t for the seeds, the normal distribution for the samples."""
        from scipy.stats import norm, t

        above = (1 + CONFIDENCE) / 2
        wide = float(t.ppf(above, self.seeds - 1)) if self.seeds > 1 else 0.0
        return math.hypot(wide * self.seed_error, float(norm.ppf(above)) * self.sample_error)


def estimate(values: NDArray[np.float64], clusters: NDArray[np.int64]) -> Estimate:
    """Return the mean of values, float64 [seeds, m], and its errors. clusters: int64 [m], of samples that go together.

    Seeds and samples are crossed: variance = that of the seeds' means / seeds + that of the sums over clusters, by
    which samples may depend on each other in any way, − that of the clusters of single seeds, which is in both.
    Sources: Liang and Zeger (Biometrika 1986) for the clusters, with count / (count − 1); Cameron, Gelbach and Miller
    (Journal of Business & Economic Statistics 2011), section 2.2, for two ways.
    """
    seeds, samples = values.shape
    mean = values.mean()
    clusters = np.unique(clusters, return_inverse=True)[1]
    of_seed, of_sample = values.mean(1) - mean, values.mean(0) - mean
    both = np.stack([np.bincount(clusters, row) for row in values - mean - of_seed[:, None] - of_sample]) / samples
    of_cluster = np.bincount(clusters, of_sample) / samples
    count = len(of_cluster)
    twice = (both**2).sum() / max(1, seeds * (seeds - 1))
    variance = max(0.0, (of_cluster**2).sum() - twice) * count / (count - 1) if count > 1 else math.nan
    return Estimate(float(mean), math.sqrt(of_seed.var() / max(1, seeds - 1)), math.sqrt(variance), seeds)


def caption_clusters(dataset: Dataset) -> NDArray[np.int64]:
    """Return a number of each sample's cluster, int64 [n]: samples are in one if they share a caption, or are linked by
    others that do. Equal captions have equal features, so as queries they are right or wrong together.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    captions = all_captions(dataset)
    codes = {text: code for code, text in enumerate(dict.fromkeys(text for _, text in captions), start=dataset.n)}
    ends = [sample for sample, _ in captions], [codes[text] for _, text in captions]
    size = dataset.n + len(codes)
    found = connected_components(coo_array((np.ones(len(captions), np.bool_), ends), (size, size)), directed=False)[1]
    return found[: dataset.n].astype(np.int64)


@dataclass(frozen=True)
class Difference:
    """How far the scores of the second runs are above those of the first; shares, 0 … 1."""

    first: float
    second: float
    paired: Estimate
    """Of second − first, query by query."""
    unpaired_error: float
    """The standard error if each run had been scored on test samples of its own."""
    queries: int
    clusters: int


def differences(
    pairs: Sequence[tuple[Evaluation, Evaluation]], groups: NDArray[np.int64], names: Sequence[str]
) -> dict[str, dict[str, dict[str, Difference | None]]]:
    """Return by method, variant and name how far the second of each pair is above the first; None without samples.

    pairs: of one test set, a pair for each seed. groups: the place in `names` of each test sample's group, or -1; int64
    [m]. Variants are those that all evaluations have.
    """
    every = [each.right for pair in pairs for each in pair]
    clusters, found = caption_clusters(pairs[0][0].test), dict[str, dict[str, dict[str, Difference | None]]]()
    for method, variants in every[0].items():
        for variant, (_, of) in variants.items():
            if all(variant in right.get(method, {}) for right in every):
                values = np.array([right[method][variant][0] for right in every], np.float64)
                order = np.argsort(groups[of], kind="stable")
                edges = np.searchsorted(groups[of][order], np.arange(len(names) + 1))
                members = (order[start:end] for start, end in zip(edges, edges[1:], strict=False))
                found.setdefault(method, {})[variant] = {
                    name: _difference(values[:, chosen], clusters[of[chosen]]) if len(chosen) else None
                    for name, chosen in zip(names, members, strict=True)
                }
    return found


def _difference(values: NDArray[np.float64], clusters: NDArray[np.int64]) -> Difference:
    """values: float64 [2 pairs, x], the first and the second run of each pair in turn."""
    first, second = (estimate(each, clusters) for each in (values[::2], values[1::2]))
    paired = estimate(values[1::2] - values[::2], clusters)
    errors = math.hypot(first.error, second.error)
    return Difference(first.mean, second.mean, paired, errors, values.shape[1], len(np.unique(clusters)))
