"""Tau by group (class, folder or any column of the samples table), counted block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ....pipeline.dataset.samples_table import PLACE_IN_SHARD
from ....pipeline.opening import Dataset
from ....trainer.errors import ConfigError
from ....trainer.evaluation.bands import BANDS, band_of_class
from .. import OnDone
from ..json_fields import AsJson, Hidden, named
from ..opening import STATE_ROWS_AT_ONCE
from .correlation import NO_GROUP, Correlation, correlate

MAX_GROUPS = 100_000
CONFIDENCE = 0.95
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

    mean: NDArray[np.float64]
    half_width: NDArray[np.float64]
    """Half width of the mean's 95 % interval (Student's t); NaN for fewer than MIN_FOR_INTERVAL samples."""
    coldest: NDArray[np.int64]
    """int64 [groups]: samples at or below the 5 % quantile of all; ties can make these more than 5 %."""
    hottest: NDArray[np.int64]
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
    sizes: Hidden[NDArray[np.int64]]
    """int64 [groups]: samples of the group in the dataset, visited or not."""
    visited: Hidden[NDArray[np.int64]]
    """int64 [groups]."""
    tau: Hidden[dict[str, GroupTau]]
    """By side."""
    correlation: dict[str, Correlation | None]
    """Side -> correlation; None with fewer than two sizes or two mean temperatures to rank."""
    bands: list[Band]
    pool_codes: Hidden[NDArray[np.int64]]
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
    """Counts blocks of samples by group name; `result` turns the counts into figures.

    limits: for each side, its mean tau, the upper bound of the coldest and the lower bound of the hottest.
    Memory grows with the groups, not with the samples.
    """

    def __init__(self, column: str, limits: Mapping[str, Sequence[float]]) -> None:
        self._column, self._limits = column, limits
        self._codes: dict[str, int] = {}
        self._sizes, self._visited = np.zeros((2, MAX_GROUPS), np.int64)
        # By side: sums of tau and of its square, both relative to the mean, and counts of the coldest and the hottest.
        self._sums = {side: np.zeros((4, MAX_GROUPS)) for side in limits}
        self._pool: list[NDArray[np.int64]] = []

    def add(
        self,
        labels: pa.Array,
        visited: NDArray[np.bool_],
        tau: Mapping[str, NDArray[np.float32]],
        pooled: NDArray[np.int64],
    ) -> None:
        """Count a block of m samples: labels are strings (null: no group), visited is bool, tau is float32 by side.

        pooled: indices within the block of samples in the pool. Raises TooManyGroupsError beyond 100,000 groups.
        """
        codes = _coded(labels, self._codes, self._column)
        self._pool.append(codes[pooled])
        known = codes != NO_GROUP
        seen = known & visited
        self._sizes += np.bincount(codes[known], minlength=MAX_GROUPS)
        self._visited += np.bincount(codes[seen], minlength=MAX_GROUPS)
        for side, (mean, low, high) in self._limits.items():
            values = tau[side][seen].astype(np.float64)
            weights = (values - mean, (values - mean) ** 2, values < low, values >= high)
            self._sums[side] += [np.bincount(codes[seen], of_one, minlength=MAX_GROUPS) for of_one in weights]

    def result(self, pool_tau: Mapping[str, NDArray[np.float32]]) -> TauGroups | None:
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
        return TauGroups(
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


def _coded(labels: pa.Array, codes: dict[str, int], column: str) -> NDArray[np.int64]:
    """Return the code of each label, int64 [m]; -1 without one. New labels are added to `codes`."""
    encoded = labels.dictionary_encode()
    # One extra element, so that code -1 maps to itself.
    own = [codes.setdefault(name, len(codes)) for name in encoded.dictionary.to_pylist()] + [NO_GROUP]
    if len(codes) > MAX_GROUPS:
        raise TooManyGroupsError(f"The column {column} has more than {MAX_GROUPS:,} values, too many to group by.")
    places: NDArray[np.int64] = encoded.indices.fill_null(NO_GROUP).to_numpy().astype(np.int64)
    return np.array(own, np.int64)[places]


def codes_of(dataset: Dataset, column: str, on_progress: OnDone) -> tuple[NDArray[np.int32], list[str]]:
    """Return the group of each of n samples and the names of the groups, sorted.

    The groups are int32 [n], places in the names, -1 without one. column: as for Labels. Calls on_progress with the
    samples done so far. Raises TooManyGroupsError beyond 100,000 groups, DatasetError.
    """
    found, labels, names = np.empty(dataset.n, np.int32), Labels(dataset, column), dict[str, int]()
    for start in range(0, dataset.n, STATE_ROWS_AT_ONCE):
        stop = min(start + STATE_ROWS_AT_ONCE, dataset.n)
        found[start:stop] = _coded(labels.take(stop - start), names, column)
        on_progress(stop, dataset.n)
    in_order = sorted(names)
    place_of = np.full(len(names) + 1, NO_GROUP, np.int32)
    place_of[[names[name] for name in in_order]] = np.arange(len(names))
    return place_of[found], in_order


def _group_tau(middle: float, visited: NDArray[np.int64], sums: NDArray[np.float64]) -> GroupTau:
    """Compute means and intervals from sums [4, groups] of tau and of its square, both relative to `middle`."""
    from scipy.stats import t

    with np.errstate(divide="ignore", invalid="ignore"):
        offset = sums[0] / visited
        variance = np.maximum(sums[1] - visited * offset**2, 0) / (visited - 1)
        half_width = t.ppf((1 + CONFIDENCE) / 2, visited - 1) * np.sqrt(variance / visited)
    half_width[visited < MIN_FOR_INTERVAL] = np.nan
    return GroupTau(middle + offset, half_width, sums[2].astype(np.int64), sums[3].astype(np.int64))


def check_columns(dataset: Dataset, columns: Sequence[str]) -> None:
    """Raise ConfigError for a column that samples cannot be grouped by."""
    known = [name for name in dataset.schema.names if name != PLACE_IN_SHARD] + [FOLDER]
    if unknown := [column for column in columns if column not in known]:
        raise ConfigError(
            f"samples cannot be grouped by {', '.join(map(repr, unknown))}: {dataset.place} has the "
            f"columns {', '.join(known)}"
        )


class Labels:
    """Yields the labels of all samples of a dataset, ordered by id, piece by piece.

    column: one of the samples table, or `folder`.
    """

    def __init__(self, dataset: Dataset, column: str) -> None:
        self.column = column
        self._source = "uri" if column == FOLDER else column
        self._tables = dataset.tables([self._source], STATE_ROWS_AT_ONCE)
        self._held = pa.chunked_array([pa.array([], pa.string())])

    def take(self, count: int) -> pa.Array:
        """Return the next `count` labels, strings; null for samples without one."""
        while len(self._held) < count:
            found = next(self._tables)[self._source].cast(pa.string())
            self._held = pa.chunked_array([*self._held.chunks, *found.chunks])
        taken, self._held = self._held.slice(0, count).combine_chunks(), self._held.slice(count)
        return pc.replace_substring_regex(taken, "/?[^/]*$", "") if self.column == FOLDER else taken
