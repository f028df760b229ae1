"""Tau by group (class, folder or any column of the samples table), counted block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ....pipeline.dataset.samples_table import PLACE_IN_SHARD
from ....pipeline.opening import Dataset
from ....storage.arrays import Int32s
from ....trainer.errors import ConfigError
from ....trainer.evaluation.bands import BANDS, band_of_class
from .. import AsJson, Bools, Float32s, Float64s, Hidden, Int64s, OnDone, named, silent
from ..opening import STATE_ROWS_AT_ONCE
from .correlation import NO_GROUP, Correlation, correlate

MAX_GROUPS = 100_000
MIN_FOR_INTERVAL = 5
"""Visited samples. With two, Student's t makes the interval 12.7 standard errors wide to each side, with five 2.8."""
CLASS_COLUMN = "group"
"""Column of the samples table: the class or folder in the source."""
FOLDER = "folder"
"""Group by the uri up to its last slash."""


class TooManyGroupsError(ConfigError):
    """A column has too many values to read or to keep in memory."""


class GroupTau(NamedTuple):
    """One side's tau over the visited samples of each group, float64 [groups]; NaN for groups without any."""

    mean: Float64s
    half_width: Float64s
    """Half width of the mean's 95 % interval (Student's t); NaN for fewer than MIN_FOR_INTERVAL samples."""
    coldest: Int64s
    """int64 [groups]: samples at or below the 5 % quantile of all; ties can make these more than 5 %."""
    hottest: Int64s
    """int64 [groups]: samples at or above the 95 % quantile of all."""


@dataclass(frozen=True)
class Band:
    """A third of the groups by size (head, medium, tail): the numbers of iSogCLR Figure 5, left."""

    name: str
    groups: int
    samples: int
    visited: int
    tau: dict[str, BandTau]
    """By side."""


@dataclass(frozen=True)
class BandTau:
    """Tau over the visited samples of a band; None if there are too few, as in GroupTau."""

    mean: float | None
    half_width: float | None
    share_of_coldest: float | None
    """This band's share of all grouped samples at or below the 5 % quantile of tau, 0 … 1."""
    share_of_hottest: float | None


@dataclass(frozen=True)
class TauGroups:
    """Size and tau of every group, largest group first, then by name."""

    column: str
    names: Annotated[list[str], AsJson(len), named("groups")]
    sizes: Hidden[Int64s]
    """int64 [groups]: samples of the group in the dataset, visited or not."""
    visited: Hidden[Int64s]
    """int64 [groups]."""
    tau: Hidden[dict[str, GroupTau]]
    """By side."""
    correlation: dict[str, Correlation | None]
    """Side -> correlation; None with fewer than two sizes or two mean temperatures to rank."""
    bands: list[Band]
    pool_codes: Hidden[Int64s]
    """int64 [pool]: index in `names` of each sample of the survey's pool, -1 without a group."""

    @property
    def word(self) -> str:
        """Noun for one group."""
        return "class" if self.column == CLASS_COLUMN else self.column

    @property
    def plural(self) -> str:
        """Noun for several groups."""
        return "classes" if self.column == CLASS_COLUMN else f"groups by {self.column}"

    def means(self) -> list[dict[str, Any]]:
        """Return name, size and mean tau by side, None without a visited sample, of every group."""
        found = []
        for at, (name, size) in enumerate(zip(self.names, self.sizes.tolist(), strict=True)):
            mean = {side: float(tau.mean[at]) if self.visited[at] else None for side, tau in self.tau.items()}
            found.append({self.column: name, "samples": size, "mean_tau": mean})
        return found


class GroupCounts:
    """Counts blocks of samples by group; `result` turns the counts into figures.

    codes, names: as from codes_of. limits: for each side, its mean tau, the upper bound of the coldest and the lower
    bound of the hottest.
    """

    def __init__(self, column: str, codes: Int32s, names: list[str], limits: Mapping[str, Sequence[float]]) -> None:
        self.column, self._codes, self._names, self._limits = column, codes, names, limits
        self._sizes, self._visited = np.zeros((2, len(names)), np.int64)
        # By side: sums of tau and of its square, both relative to the mean, and counts of the coldest and the hottest.
        self._sums = {side: np.zeros((4, len(names))) for side in limits}

    def add(self, block: range, kept: Bools, visited: Bools, tau: Mapping[str, Float32s]) -> None:
        """Count a block of m samples: bool [m], tau float32 [m] by side. Those not kept are in no group."""
        codes, count = self._codes[block.start : block.stop], partial(np.bincount, minlength=len(self._names))
        known = kept & (codes != NO_GROUP)
        seen = known & visited
        self._sizes += count(codes[known])
        self._visited += count(codes[seen])
        for side, (mean, low, high) in self._limits.items():
            values = tau[side][seen].astype(np.float64)
            weights = (values - mean, (values - mean) ** 2, values < low, values >= high)
            self._sums[side] += [count(codes[seen], weights=of_one) for of_one in weights]

    def result(self, ids: Int64s, tau: Mapping[str, Float32s]) -> TauGroups | None:
        """Return the figures; None if no sample has a group. ids, tau: of the pool, int64 [p], by side float32 [p]."""
        order = np.argsort(-self._sizes, kind="stable")[: np.count_nonzero(self._sizes)]  # of equals, by name
        if not len(order):
            return None
        place_of = np.full(len(self._names) + 1, NO_GROUP, np.int64)
        place_of[order] = np.arange(len(order))
        pool_codes, sizes, visited = place_of[self._codes[ids]], self._sizes[order], self._visited[order]
        sums = {side: of_side[:, order] for side, of_side in self._sums.items()}
        found = {side: _group_tau(self._limits[side][0], visited, of_side) for side, of_side in sums.items()}
        names, bands = [self._names[code] for code in order], self._bands(sizes, visited, sums)
        correlation = {side: correlate(sizes, found[side].mean, pool_codes, tau[side]) for side in found}
        return TauGroups(self.column, names, sizes, visited, found, correlation, bands, pool_codes)

    def _bands(self, sizes: Int64s, visited: Int64s, sums: Mapping[str, Float64s]) -> list[Band]:
        band_of, bands = band_of_class(sizes), []
        for band, name in enumerate(BANDS):
            inside, tau = band_of == band, {}
            for side, of_side in sums.items():
                whole = of_side[:, inside].sum(axis=1, keepdims=True)
                found = _group_tau(self._limits[side][0], visited[inside].sum(keepdims=True), whole)
                mean, half_width = (None if np.isnan(of_one) else float(of_one[0]) for of_one in found[:2])
                coldest, hottest = (
                    float(here / everywhere) if everywhere else None
                    for here, everywhere in zip(whole[2:, 0], of_side[2:].sum(axis=1), strict=True)
                )
                tau[side] = BandTau(mean, half_width, coldest, hottest)
            bands.append(Band(name, int(inside.sum()), int(sizes[inside].sum()), int(visited[inside].sum()), tau))
        return bands


def codes_of(dataset: Dataset, column: str, on_progress: OnDone = silent) -> tuple[Int32s, list[str]]:
    """Return the group of each of n samples and the names of the groups, sorted.

    The groups are int32 [n], places in the names, -1 without one. column: one of the samples table, or `folder`. Calls
    on_progress with the samples done so far. Raises TooManyGroupsError beyond 100,000 groups, DatasetError.
    """
    source = "uri" if column == FOLDER else column
    found, codes, done = np.empty(dataset.n, np.int32), dict[str, int](), 0
    for table in dataset.tables([source], STATE_ROWS_AT_ONCE):
        labels = table[source].cast(pa.string()).combine_chunks()
        labels = pc.replace_substring_regex(labels, "/?[^/]*$", "") if column == FOLDER else labels
        encoded = labels.dictionary_encode()
        # One extra element, so that code -1 maps to itself.
        own = [codes.setdefault(name, len(codes)) for name in encoded.dictionary.to_pylist()] + [NO_GROUP]
        if len(codes) > MAX_GROUPS:
            raise TooManyGroupsError(f"The column {column} has more than {MAX_GROUPS:,} values, too many to group by.")
        places = encoded.indices.fill_null(NO_GROUP).to_numpy(zero_copy_only=False)
        found[done : (done := done + len(labels))] = np.array(own, np.int32)[places]
        on_progress(done, dataset.n)
    names = sorted(codes)
    place_of = np.full(len(codes) + 1, NO_GROUP, np.int32)
    place_of[[codes[name] for name in names]] = np.arange(len(names))
    return place_of[found], names


def _group_tau(middle: float, visited: Int64s, sums: Float64s) -> GroupTau:
    """Compute means and intervals from sums [4, groups] of tau and of its square, both relative to `middle`."""
    from scipy.stats import t

    with np.errstate(divide="ignore", invalid="ignore"):
        offset = sums[0] / visited
        variance = np.maximum(sums[1] - visited * offset**2, 0) / (visited - 1)
        half_width = t.ppf((1 + 0.95) / 2, visited - 1) * np.sqrt(variance / visited)
    half_width[visited < MIN_FOR_INTERVAL] = np.nan
    return GroupTau(middle + offset, half_width, sums[2].astype(np.int64), sums[3].astype(np.int64))


def check_columns(dataset: Dataset, columns: Sequence[str]) -> None:
    """Raise ConfigError for a column that samples cannot be grouped by."""
    known = [name for name in dataset.schema.names if name != PLACE_IN_SHARD] + [FOLDER]
    if unknown := [column for column in columns if column not in known]:
        wrong, has = ", ".join(map(repr, unknown)), ", ".join(known)
        raise ConfigError(f"samples cannot be grouped by {wrong}: {dataset.place} has the columns {has}")
