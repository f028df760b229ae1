"""Tau by group (class, folder or any column of the samples table), counted block by block."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...trainer.evaluation.bands import BANDS, band_of_class

MAX_GROUPS = 100_000
PERMUTATIONS = 20
CONFIDENCE = 0.95
FEW_GROUPS = 20
NO_GROUP = -1
CLASS_COLUMN = "group"
"""Column of the samples table: the class or folder in the source."""


class TooManyGroupsError(Exception):
    """A column has too many values to read or to keep in memory."""


class Correlation(NamedTuple):
    """Spearman's rank correlation of group size and the group's mean tau, over the groups."""

    spearman: float
    p_value: float
    """Two-sided, for independent groups; for fewer than 20 groups from permutations, all or 9,999."""
    permuted: float | None
    """The correlation expected by chance: mean over 20 permutations of the visited samples' groups. None if no
    permutation leaves two groups to rank."""
    permuted_range: tuple[float, float] | None
    """Lowest and highest of the 20."""


class GroupTau(NamedTuple):
    """One side's tau over the visited samples of each group, float64 [groups]; NaN for groups without any."""

    mean: NDArray[np.float64]
    half_width: NDArray[np.float64]
    """Half width of the mean's 95 % interval (Student's t); NaN for fewer than two samples."""
    coldest: NDArray[np.int64]
    """int64 [groups]: samples at or below the 5 % quantile of all; ties can make these more than 5 %."""
    hottest: NDArray[np.int64]
    """int64 [groups]: samples at or above the 95 % quantile of all."""


class Band(NamedTuple):
    """A third of the groups by size (head, medium, tail): the numbers of iSogCLR Figure 5, left."""

    name: str
    groups: int
    samples: int
    visited: int
    tau: dict[str, BandTau]
    """By side."""


class BandTau(NamedTuple):
    """Tau over the visited samples of a band; None if there are too few."""

    mean: float | None
    half_width: float | None
    share_of_coldest: float | None
    """This band's share of all grouped samples at or below the 5 % quantile of tau, 0 … 1."""
    share_of_hottest: float | None


@dataclass(frozen=True)
class Groups:
    """Size and tau of every group, largest group first, then by name."""

    column: str
    names: list[str]
    sizes: NDArray[np.int64]
    """int64 [groups]: samples of the group in the dataset, visited or not."""
    visited: NDArray[np.int64]
    """int64 [groups]."""
    tau: dict[str, GroupTau]
    """By side."""
    correlation: dict[str, Correlation | None]
    """Side -> correlation; None with fewer than two sizes or two mean temperatures to rank."""
    bands: list[Band]
    pool_codes: NDArray[np.int64]
    """int64 [pool]: index in `names` of each sample of the survey's pool, -1 without a group."""

    @property
    def word(self) -> str:
        """Noun for one group."""
        return "class" if self.column == CLASS_COLUMN else self.column

    @property
    def plural(self) -> str:
        """Noun for several groups."""
        return "classes" if self.column == CLASS_COLUMN else f"groups by {self.column}"


class GroupCounts:
    """Counts blocks of samples by group name; `result` turns the counts into figures.

    limits: for each side, its mean tau, the upper bound of the coldest and the lower bound of the hottest.
    Memory grows with the groups, not with the samples.
    """

    def __init__(self, column: str, limits: Mapping[str, Sequence[float]]) -> None:
        self._column, self._limits = column, limits
        self._codes: dict[str, int] = {}
        self._sizes = np.zeros(MAX_GROUPS, np.int64)
        self._visited = np.zeros(MAX_GROUPS, np.int64)
        # By side: sums of tau and of its square, both relative to the mean, and counts of the coldest and the hottest.
        self._sums = {side: np.zeros((4, MAX_GROUPS)) for side in limits}
        self._pool: list[NDArray[np.int64]] = []

    def add(
        self, labels: pa.Array, visited: NDArray[np.bool_], tau: Mapping[str, NDArray[np.float32]],
        pooled: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Count a block of m samples: labels are strings (null: no group), visited is bool, tau is float32 by side.

        pooled: indices within the block of samples in the pool.

        Raises TooManyGroupsError beyond 100,000 groups.
        """
        codes = self._code(labels)
        self._pool.append(codes[pooled])
        known = codes != NO_GROUP
        seen = known & visited
        self._sizes += np.bincount(codes[known], minlength=MAX_GROUPS)
        self._visited += np.bincount(codes[seen], minlength=MAX_GROUPS)
        for side, (mean, low, high) in self._limits.items():
            values = tau[side][seen].astype(np.float64)
            for sums, weights in zip(
                self._sums[side], (values - mean, (values - mean) ** 2, values < low, values >= high), strict=True
            ):
                sums += np.bincount(codes[seen], weights, minlength=MAX_GROUPS)

    def _code(self, labels: pa.Array) -> NDArray[np.int64]:
        encoded = labels.dictionary_encode()
        names = encoded.dictionary.to_pylist()
        # One extra element, so that code -1 maps to itself.
        codes = np.full(len(names) + 1, NO_GROUP, np.int64)
        codes[:-1] = [self._codes.setdefault(name, len(self._codes)) for name in names]
        if len(self._codes) > MAX_GROUPS:
            raise TooManyGroupsError(
                f"The column {self._column} has more than {MAX_GROUPS:,} values, too many to group tau by."
            )
        places: NDArray[np.int64] = encoded.indices.fill_null(NO_GROUP).to_numpy().astype(np.int64)
        return codes[places]

    def result(self, pool_tau: Mapping[str, NDArray[np.float32]]) -> Groups | None:
        """Return the figures; None if no sample has a group. pool_tau: tau of the pool by side, in pool order."""
        if not self._codes:
            return None
        found, sizes = list(self._codes), self._sizes[: len(self._codes)]
        order = np.array(sorted(range(len(found)), key=lambda code: (-sizes[code], found[code])), np.int64)
        place_of = np.full(len(found) + 1, NO_GROUP, np.int64)
        place_of[order] = np.arange(len(order))
        pool_codes = place_of[np.concatenate(self._pool)]
        sizes, visited = sizes[order], self._visited[order]
        sums = {side: of_side[:, order] for side, of_side in self._sums.items()}
        tau = {side: _group_tau(self._limits[side][0], visited, of_side) for side, of_side in sums.items()}
        return Groups(
            column=self._column,
            names=[found[code] for code in order],
            sizes=sizes,
            visited=visited,
            tau=tau,
            correlation={side: correlate(sizes, tau[side].mean, pool_codes, pool_tau[side]) for side in tau},
            bands=self._bands(sizes, visited, sums),
            pool_codes=pool_codes,
        )

    def _bands(
        self, sizes: NDArray[np.int64], visited: NDArray[np.int64], sums: Mapping[str, NDArray[np.float64]]
    ) -> list[Band]:
        band_of, made = band_of_class(sizes), []
        for band, name in enumerate(BANDS):
            inside = band_of == band
            tau = {side: self._band_tau(side, visited, of_side, inside) for side, of_side in sums.items()}
            counts = int(inside.sum()), int(sizes[inside].sum()), int(visited[inside].sum())
            made.append(Band(name, *counts, tau))
        return made

    def _band_tau(
        self, side: str, visited: NDArray[np.int64], sums: NDArray[np.float64], inside: NDArray[np.bool_]
    ) -> BandTau:
        whole = sums[:, inside].sum(axis=1, keepdims=True)
        found = _group_tau(self._limits[side][0], visited[inside].sum(keepdims=True), whole)
        coldest, hottest = sums[2].sum(), sums[3].sum()
        return BandTau(
            _known(found.mean[0]),
            _known(found.half_width[0]),
            float(found.coldest[0] / coldest) if coldest else None,
            float(found.hottest[0] / hottest) if hottest else None,
        )


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _group_tau(middle: float, visited: NDArray[np.int64], sums: NDArray[np.float64]) -> GroupTau:
    """Compute means and intervals from sums [4, groups] of tau and of its square, both relative to `middle`."""
    from scipy.stats import t

    with np.errstate(divide="ignore", invalid="ignore"):
        offset = sums[0] / visited
        variance = np.maximum(sums[1] - visited * offset**2, 0) / (visited - 1)
        half_width = t.ppf((1 + CONFIDENCE) / 2, visited - 1) * np.sqrt(variance / visited)
    half_width[visited < 2] = np.nan
    return GroupTau(middle + offset, half_width, sums[2].astype(np.int64), sums[3].astype(np.int64))


def correlate(
    sizes: NDArray[np.int64], mean_tau: NDArray[np.float64], codes: NDArray[np.int64], tau: NDArray[np.float32]
) -> Correlation | None:
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
    shuffled = (mean_by_group(rng.permutation(codes), tau, len(sizes)) for _ in range(PERMUTATIONS))
    control = [_spearman(sizes, means) for means in shuffled]
    known = [value for value in control if not np.isnan(value)]
    chance = (float(np.mean(known)), (min(known), max(known))) if known else (None, None)
    return Correlation(spearman, _p_value(sizes, mean_tau), *chance)


def mean_by_group(codes: NDArray[np.int64], tau: NDArray[np.float32], groups: int) -> NDArray[np.float64]:
    """Return the mean of tau, float32 [m], per group, float64 [groups]; NaN for a group without samples."""
    known = codes != NO_GROUP
    sums = np.bincount(codes[known], weights=tau[known], minlength=groups)
    counts = np.bincount(codes[known], minlength=groups)
    means = np.full(groups, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _spearman(sizes: NDArray[np.int64], mean_tau: NDArray[np.float64]) -> float:
    """Return NaN for fewer than two distinct sizes or two distinct means."""
    from scipy.stats import rankdata

    known = ~np.isnan(mean_tau)
    ranks = [rankdata(values[known]) for values in (sizes, mean_tau)]
    if any(len(np.unique(of_one)) < 2 for of_one in ranks):
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _p_value(sizes: NDArray[np.int64], mean_tau: NDArray[np.float64]) -> float:
    """Return the two-sided p-value of an existing Spearman correlation."""
    from scipy.stats import permutation_test, rankdata, spearmanr

    known = ~np.isnan(mean_tau)
    if known.sum() >= FEW_GROUPS:
        return float(spearmanr(sizes[known], mean_tau[known]).pvalue)
    # Student's t, which spearmanr uses, is inaccurate for few groups.
    ranks = rankdata(mean_tau[known])
    found = permutation_test(
        (rankdata(sizes[known]),), lambda of_sizes, axis: (of_sizes * ranks).sum(axis=axis),
        permutation_type="pairings", rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(found.pvalue)
