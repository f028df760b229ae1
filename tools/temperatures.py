"""What the temperatures say, as numbers: one side's distribution, and tau against the size of a sample's class."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .inspection import Inspection, RunState

PERMUTATIONS = 20
NO_CLASS = -1


class TauSummary(NamedTuple):
    """The temperatures of one side's visited samples; dimensionless."""

    mean: float
    min: float
    q05: float
    median: float
    q95: float
    max: float
    share_at_tau_min: float | None
    """Share of the samples at the floor, 0 … 1; None where the objective has none."""
    share_at_tau_max: float | None


class Correlation(NamedTuple):
    """Spearman's rank correlation of class size and the class's mean tau, over the classes."""

    spearman: float
    permuted: float | None
    """The same with the samples' class labels permuted, mean of 20 permutations: what chance gives. None where so few
    samples were visited that no permutation leaves two classes to rank."""


@dataclass(frozen=True)
class Side:
    """One side of the pairs, or the one side of a run on images."""

    name: str
    """As in the state: `first`, `second` or `sample`."""
    label: str
    """For people: image, text, sample."""
    tau: NDArray[np.float32]
    """float32 [n], in the order of the ids; only `visited` samples' count."""
    summary: TauSummary


@dataclass(frozen=True)
class Classes:
    """Size and mean temperature of every class, largest class first."""

    names: list[str]
    sizes: NDArray[np.int64]
    """int64 [classes]: samples of the class in the dataset, visited or not."""
    codes: NDArray[np.int64]
    """int64 [n]: each sample's place in `names`, -1 where it has no class."""
    mean_tau: dict[str, NDArray[np.float64]]
    """By side, float64 [classes]: mean over the visited samples; NaN where none was visited."""
    correlation: dict[str, Correlation | None]
    """By side; None where fewer than two sizes or two mean temperatures leave nothing to rank."""


@dataclass(frozen=True)
class Temperatures:
    """All that is known of a run's temperatures. `notes` say in plain words why a part is missing."""

    sides: list[Side]
    """Empty where there is no state, no temperature in it, or no visited sample."""
    classes: Classes | None
    notes: list[str]


def measure(inspection: Inspection) -> Temperatures:
    """Turn a run's state and its dataset's classes into figures."""
    state, dataset, notes = inspection.state, inspection.dataset, list(inspection.notes)
    if state is None or not state.visited.any():
        return Temperatures([], None, notes)
    sides = _summarise_sides(state)
    if dataset is None or not sides:
        return Temperatures(sides, None, notes)
    classes = summarise_classes(dataset.column("group"), state.visited, sides)
    if classes is None:
        notes.append("The dataset names no classes, so tau cannot be set against class size.")
    elif not any(classes.correlation.values()):
        notes.append("Class size and tau have no correlation: it takes visited classes of at least two sizes, with "
                     "two mean temperatures.")  # fmt: skip
    return Temperatures(sides, classes, notes)


def _summarise_sides(state: RunState) -> list[Side]:
    return [
        Side(name, state.labels[name], tau, summarise(tau[state.visited], state.tau_min, state.tau_max))
        for name, tau in state.tau.items()
    ]


def summarise(tau: NDArray[np.float32], tau_min: float | None, tau_max: float | None) -> TauSummary:
    """Summarise the temperatures of one side, float32 [m], m >= 1; the bounds are those of the objective."""
    low, median, high = np.quantile(tau, [0.05, 0.5, 0.95]).tolist()
    # The bounds as the state has them: 0.005 is not a float32.
    at_min = None if tau_min is None else float((tau <= np.float32(tau_min)).mean())
    at_max = None if tau_max is None else float((tau >= np.float32(tau_max)).mean())
    return TauSummary(
        float(tau.mean(dtype=np.float64)), float(tau.min()), low, median, high, float(tau.max()), at_min, at_max
    )


def summarise_classes(groups: pa.ChunkedArray, visited: NDArray[np.bool_], sides: list[Side]) -> Classes | None:
    """Set tau against class size; None where no sample has a class.

    groups: the dataset's column of class names, [n]; null is no class. visited: bool [n].
    """
    names, codes = _codes(groups)
    if not names:
        return None
    sizes = np.bincount(codes[codes != NO_CLASS], minlength=len(names))
    return Classes(
        names=names,
        sizes=sizes,
        codes=codes,
        mean_tau={side.name: mean_by_class(codes[visited], side.tau[visited], len(names)) for side in sides},
        correlation={side.name: correlate(sizes, codes, side.tau, visited) for side in sides},
    )


def mean_by_class(codes: NDArray[np.int64], tau: NDArray[np.float32], classes: int) -> NDArray[np.float64]:
    """Mean of tau, float32 [m], over the samples of each class, float64 [classes]; NaN for a class without samples."""
    known = codes != NO_CLASS
    sums = np.bincount(codes[known], weights=tau[known], minlength=classes)
    counts = np.bincount(codes[known], minlength=classes)
    means = np.full(classes, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def correlate(
    sizes: NDArray[np.int64], codes: NDArray[np.int64], tau: NDArray[np.float32], visited: NDArray[np.bool_]
) -> Correlation | None:
    """Spearman's correlation of class size and mean tau, and its control; None where there is nothing to rank.

    sizes: int64 [classes]. codes, tau, visited: [n]. The control permutes `codes` over all samples, so class sizes
    stay what they are while every class becomes a random draw of samples. Where tau is skewed to low values the
    control lies below 0, for the mean of a few such samples is more often above than below that of many.
    """
    spearman = _spearman(sizes, mean_by_class(codes[visited], tau[visited], len(sizes)))
    if np.isnan(spearman):
        return None
    # Seeded by tau itself: the same figure at every look, and independent permutations for every side and run.
    rng = np.random.default_rng(zlib.crc32(tau.tobytes()))
    shuffled = (rng.permutation(codes)[visited] for _ in range(PERMUTATIONS))
    control = [_spearman(sizes, mean_by_class(labels, tau[visited], len(sizes))) for labels in shuffled]
    known = [value for value in control if not np.isnan(value)]
    return Correlation(spearman, float(np.mean(known)) if known else None)


def _spearman(sizes: NDArray[np.int64], mean_tau: NDArray[np.float64]) -> float:
    """NaN where fewer than two distinct sizes, or two distinct means, are known."""
    from scipy.stats import spearmanr

    known = ~np.isnan(mean_tau)
    if len(np.unique(sizes[known])) < 2 or len(np.unique(mean_tau[known])) < 2:
        return float("nan")
    return float(spearmanr(sizes[known], mean_tau[known]).statistic)


def _codes(groups: pa.ChunkedArray) -> tuple[list[str], NDArray[np.int64]]:
    """Class names, largest class first and then by name, and each sample's place among them, int64 [n]."""
    encoded = groups.dictionary_encode().unify_dictionaries().combine_chunks()
    names = encoded.dictionary.to_pylist()
    found = encoded.indices.fill_null(NO_CLASS).to_numpy().astype(np.int64)
    sizes = np.bincount(found[found != NO_CLASS], minlength=len(names))
    order = sorted(range(len(names)), key=lambda place: (-sizes[place], names[place]))
    # One place more than there are classes, so that code -1 finds itself.
    place_of = np.full(len(names) + 1, NO_CLASS, np.int64)
    place_of[order] = np.arange(len(names))
    return [names[place] for place in order], place_of[found]
