"""Rank correlations: of two temperatures per sample, and of a group's size and its mean tau."""

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from pydantic import SerializerFunctionWrapHandler, model_serializer

from .. import Float32s, Float64s, Int64s
from .distribution import Distribution

JOINT_BINS = 60
PERMUTATIONS = 20
MODERATE, NEGLIGIBLE = 0.5, "negligible"
STRENGTHS = ((0.9, "very strong"), (0.7, "strong"), (MODERATE, "moderate"), (0.3, "weak"), (0.0, NEGLIGIBLE))
"""Lowest absolute value and its word. Source: Hinkle, Wiersma and Jurs, Applied Statistics for the Behavioral
Sciences (2003), with "very high", "high" and "low" for very strong, strong and weak."""
CERTAINTIES = ((0.001, "certain"), (0.05, "likely"))
"""Upper bound of the p-value and its word."""
UNCERTAIN = "uncertain"
NO_GROUP = -1


class Joint(NamedTuple):
    """Two temperatures per sample: of both sides, or at two snapshots."""

    counts: Int64s
    """int64 [bins, bins]: rows are bins of the first value, ascending."""
    edges: tuple[Float64s, Float64s]
    """Bin edges of the first and of the second value, float64 [bins + 1]."""
    spearman: float | None
    """Rank correlation over the samples; None if either value is constant."""


class JointCounts:
    """Counts pairs of temperatures and sums up their ranks, block by block; their distributions must be complete."""

    def __init__(self, first: Distribution, second: Distribution) -> None:
        self._distributions = (first, second)
        self._edges = (first.edges(JOINT_BINS), second.edges(JOINT_BINS))
        self._counts = np.zeros([len(edges) - 1 for edges in self._edges], np.int64)
        self._products = np.zeros(3)  # of the centred ranks: 1 × 1, 2 × 2, 1 × 2

    def add(self, first: Float32s, second: Float32s) -> None:
        """Count pairs, float32 [m] each."""
        places, ranks = [], []
        for values, edges, distribution in zip((first, second), self._edges, self._distributions, strict=True):
            share = (values.astype(np.float64) - edges[0]) / (edges[-1] - edges[0])
            places.append(np.clip(share * (len(edges) - 1), 0, len(edges) - 2).astype(np.int64))
            ranks.append(distribution.ranks(values) - 0.5)
        flat = np.ravel_multi_index((places[0], places[1]), self._counts.shape)
        self._counts += np.bincount(flat, minlength=self._counts.size).reshape(self._counts.shape)
        self._products += [ranks[0] @ ranks[0], ranks[1] @ ranks[1], ranks[0] @ ranks[1]]

    def result(self) -> Joint:
        first, second, both = self._products.tolist()
        return Joint(self._counts, self._edges, both / (first * second) ** 0.5 if first and second else None)


@final
@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of group size and the group's mean tau, over the groups."""

    spearman: float
    p_value: float
    """Two-sided, for independent groups; for fewer than 20 groups from permutations, all or 9,999."""
    permuted: float | None
    """The correlation expected by chance: mean over 20 permutations of the visited samples' groups. None if no
    permutation leaves two groups to rank."""
    permuted_range: tuple[float, float] | None
    """Lowest and highest of the 20."""

    @property
    def strength(self) -> str:
        """One of STRENGTHS, by the absolute value with two decimals, as it is shown."""
        return next(word for lowest, word in STRENGTHS if round(abs(self.spearman), 2) >= lowest)

    @property
    def certainty(self) -> str:
        """How likely it is more than chance: `certain`, `likely` or `uncertain`.

        It has to exceed what chance gives in its direction, too: the p-value does not know that the control may lie
        beside 0.
        """
        chance = self.permuted_range and self.permuted_range[self.spearman > 0]
        if chance is None or self.spearman * (self.spearman - chance) <= 0:
            return UNCERTAIN
        return next((word for highest, word in CERTAINTIES if self.p_value < highest), UNCERTAIN)

    @property
    def is_strong(self) -> bool:
        """Whether it is at least moderate."""
        return round(abs(self.spearman), 2) >= MODERATE

    @property
    def is_likely(self) -> bool:
        """Whether it is at least likely."""
        return self.certainty != UNCERTAIN

    @property
    def verdict(self) -> str:
        """Strength and certainty: `strong and certain`, `weak but certain`."""
        return f"{self.strength} {'and' if self.is_strong == self.is_likely else 'but'} {self.certainty}"

    @model_serializer(mode="wrap")
    def _in_json(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {**fields(self), "strength": self.strength, "certainty": self.certainty}


def correlate(sizes: Int64s, mean_tau: Float64s, codes: Int64s, tau: Float32s) -> Correlation | None:
    """Compute Spearman's correlation of group size and mean tau, and its control; None if there is nothing to rank.

    sizes int64, mean_tau float64 [groups]; NaN means not visited. codes, tau: [p], of the pool: all visited samples or
    a random million of them. The control permutes `codes`: group sizes stay, and every group becomes a random draw of
    samples. If tau is skewed to low values, the control lies below 0, because the mean of a few such samples is more
    often above than below the mean of many.
    """
    spearman = _spearman(sizes, mean_tau)
    if np.isnan(spearman):
        return None
    # Seeded by tau itself: reproducible, with independent permutations for every side and run.
    rng = np.random.default_rng(zlib.crc32(tau.tobytes()))
    small = codes.astype(np.int32)  # which is shuffled in half the time
    shuffled = (mean_by_group(rng.permutation(small), tau, len(sizes)) for _ in range(PERMUTATIONS))
    control = [value for means in shuffled if not np.isnan(value := _spearman(sizes, means))]
    chance = (float(np.mean(control)), (min(control), max(control))) if control else (None, None)
    return Correlation(spearman, _p_value(sizes, mean_tau), *chance)


def mean_by_group(codes: NDArray[np.integer], tau: Float32s, groups: int) -> Float64s:
    """Return the mean of tau, float32 [m], per group, float64 [groups]; NaN for a group without samples."""
    known = codes != NO_GROUP
    sums = np.bincount(codes[known], weights=tau[known], minlength=groups)
    counts = np.bincount(codes[known], minlength=groups)
    return np.asarray(np.divide(sums, counts, out=np.full(groups, np.nan), where=counts > 0))


def _spearman(sizes: Int64s, mean_tau: Float64s) -> float:
    """Return NaN for fewer than two distinct sizes or two distinct means."""
    from scipy.stats import rankdata

    known = ~np.isnan(mean_tau)
    ranks = [rankdata(values[known]) for values in (sizes, mean_tau)]
    if any(len(np.unique(of_one)) < 2 for of_one in ranks):
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _p_value(sizes: Int64s, mean_tau: Float64s) -> float:
    """Return the two-sided p-value of an existing Spearman correlation."""
    from scipy.stats import permutation_test, rankdata, spearmanr

    known = ~np.isnan(mean_tau)
    if known.sum() >= 20:
        return float(spearmanr(sizes[known], mean_tau[known]).pvalue)
    # Student's t, which spearmanr uses, is inaccurate for few groups.
    ranks = rankdata(mean_tau[known])
    found = permutation_test(
        (rankdata(sizes[known]),),
        lambda of_sizes, axis: (of_sizes * ranks).sum(axis=axis),
        permutation_type="pairings",
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)
