"""Tau by group: by class, by folder, or by any column of the samples table, counted block by block."""

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
"""Of the samples table: the class, or the folder, that a sample came with."""


class TooManyGroupsError(Exception):
    """A column has more values than groups can be told apart by a person, or kept in memory."""


class Correlation(NamedTuple):
    """Spearman's rank correlation of group size and the group's mean tau, over the groups."""

    spearman: float
    p_value: float
    """Two-sided, for groups that do not depend on each other: of fewer than 20 from permutations, all or 9,999."""
    permuted: float | None
    """The same with the visited samples' groups permuted, mean of 20 permutations: what chance gives. None where no
    permutation leaves two groups to rank."""
    permuted_range: tuple[float, float] | None
    """The lowest and the highest of the 20."""


class GroupTau(NamedTuple):
    """One side's tau over the visited samples of each group, float64 [groups] each; NaN where there is nothing."""

    mean: NDArray[np.float64]
    half_width: NDArray[np.float64]
    """Of the mean's 95 % interval (Student's t); NaN for fewer than two samples."""
    coldest: NDArray[np.int64]
    """int64 [groups]: samples at or below the 5 % quantile of all; more than 5 % where many have one tau."""
    hottest: NDArray[np.int64]
    """int64 [groups]: samples at or above the 95 % quantile of all."""


class Band(NamedTuple):
    """A third of the groups by size (head, medium, tail) and its samples: iSogCLR Figure 5, left, in numbers."""

    name: str
    groups: int
    samples: int
    visited: int
    tau: dict[str, BandTau]
    """By side."""


class BandTau(NamedTuple):
    """Tau over the visited samples of a band; None where there are too few."""

    mean: float | None
    half_width: float | None
    share_of_coldest: float | None
    """Of all grouped samples at or below the 5 % quantile of tau, the share that lies in this band, 0 … 1."""
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
    """By side; None where fewer than two sizes or two mean temperatures leave nothing to rank."""
    bands: list[Band]
    pool_codes: NDArray[np.int64]
    """int64 [pool]: of the samples of the survey's pool, each one's place in `names`, -1 where it has no group."""

    @property
    def word(self) -> str:
        """What people call one of them."""
        return "class" if self.column == CLASS_COLUMN else self.column

    @property
    def plural(self) -> str:
        """What people call several of them."""
        return "classes" if self.column == CLASS_COLUMN else f"groups by {self.column}"


class GroupCounts:
    """Takes in blocks of samples with their groups' names; `result` turns the counts into figures.

    limits: by side, its mean tau, what the coldest lie below, and what the hottest do not lie below.
    Memory grows with the groups, not with the samples.
    """

    def __init__(self, column: str, limits: Mapping[str, Sequence[float]]) -> None:
        self._column, self._limits = column, limits
        self._codes: dict[str, int] = {}
        self._sizes = np.zeros(MAX_GROUPS, np.int64)
        self._visited = np.zeros(MAX_GROUPS, np.int64)
        # By side: sum of tau, sum of its squares, both from the mean on, and how many are coldest and hottest.
        self._sums = {side: np.zeros((4, MAX_GROUPS)) for side in limits}
        self._pool: list[NDArray[np.int64]] = []

    def add(
        self, labels: pa.Array, visited: NDArray[np.bool_], tau: Mapping[str, NDArray[np.float32]],
        pooled: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Count a block of m samples: labels, strings, null is no group; visited, bool; tau by side, float32.

        pooled: the places among them of those in the pool.

        Raises TooManyGroupsError from 100,001 groups on.
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
        # One place more than there are names, so that code -1 finds itself.
        codes = np.full(len(names) + 1, NO_GROUP, np.int64)
        codes[:-1] = [self._codes.setdefault(name, len(self._codes)) for name in names]
        if len(self._codes) > MAX_GROUPS:
            raise TooManyGroupsError(
                f"The column {self._column} has more than {MAX_GROUPS:,} values, too many to group tau by."
            )
        places: NDArray[np.int64] = encoded.indices.fill_null(NO_GROUP).to_numpy().astype(np.int64)
        return codes[places]

    def result(self, pool_tau: Mapping[str, NDArray[np.float32]]) -> Groups | None:
        """The figures; None where no sample has a group. pool_tau: tau of the pool by side, in its order."""
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
    """Means and their intervals from the sums of tau and of its squares, both from `middle` on: sums [4, groups]."""
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
    """Spearman's correlation of group size and mean tau, and its control; None where there is nothing to rank.

    sizes int64, mean_tau float64 [groups]; NaN is not visited. codes, tau: of the pool, [p]: all visited samples, or
    a million of them drawn at random. The control permutes `codes`: group sizes stay what they are while every group
    becomes a random draw of samples. Where tau is skewed to low values the control lies below 0, for the mean of a few
    such samples is more often above than below that of many.
    """
    spearman = _spearman(sizes, mean_tau)
    if np.isnan(spearman):
        return None
    # Seeded by tau itself: the same figure at every look, and independent permutations for every side and run.
    rng = np.random.default_rng(zlib.crc32(tau.tobytes()))
    shuffled = (mean_by_group(rng.permutation(codes), tau, len(sizes)) for _ in range(PERMUTATIONS))
    control = [_spearman(sizes, means) for means in shuffled]
    known = [value for value in control if not np.isnan(value)]
    chance = (float(np.mean(known)), (min(known), max(known))) if known else (None, None)
    return Correlation(spearman, _p_value(sizes, mean_tau), *chance)


def mean_by_group(codes: NDArray[np.int64], tau: NDArray[np.float32], groups: int) -> NDArray[np.float64]:
    """Mean of tau, float32 [m], over the samples of each group, float64 [groups]; NaN for a group without samples."""
    known = codes != NO_GROUP
    sums = np.bincount(codes[known], weights=tau[known], minlength=groups)
    counts = np.bincount(codes[known], minlength=groups)
    means = np.full(groups, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _spearman(sizes: NDArray[np.int64], mean_tau: NDArray[np.float64]) -> float:
    """NaN where fewer than two distinct sizes, or two distinct means, are known."""
    from scipy.stats import rankdata

    known = ~np.isnan(mean_tau)
    ranks = [rankdata(values[known]) for values in (sizes, mean_tau)]
    if any(len(np.unique(of_one)) < 2 for of_one in ranks):
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _p_value(sizes: NDArray[np.int64], mean_tau: NDArray[np.float64]) -> float:
    """Of Spearman's correlation, which there is, two-sided."""
    from scipy.stats import permutation_test, rankdata, spearmanr

    known = ~np.isnan(mean_tau)
    if known.sum() >= FEW_GROUPS:
        return float(spearmanr(sizes[known], mean_tau[known]).pvalue)
    # Student's t, which spearmanr takes, is far off for so few.
    ranks = rankdata(mean_tau[known])
    found = permutation_test(
        (rankdata(sizes[known]),), lambda of_sizes, axis: (of_sizes * ranks).sum(axis=axis),
        permutation_type="pairings", rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(found.pvalue)
