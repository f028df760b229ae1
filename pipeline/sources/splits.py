"""Select samples of a source: hold out a test set, cut a long tail, pair samples of different classes.

Pure functions of listing and seed.
"""

from dataclasses import dataclass

import numpy as np

from ...storage.arrays import Int64s
from ..errors import SourceError
from . import ClassGroups, Selection
from .shards import in_runs

_HOLD_OUT, _LONG_TAIL, _WHOLE_CLASSES = 1, 2, 3
"""Each draw has its own generator, so that draws do not affect each other."""


@dataclass(frozen=True)
class Drawn:
    """The rule by which the training set, or the test set, is drawn from a source."""

    holdout: float | None
    longtail: float | None
    seed: int
    test: bool = False

    def __call__(self, n: int, groups: ClassGroups | None) -> Int64s:
        """Return sorted source indices, int64. Raises SourceError as `hold_out` and `long_tail`."""
        kept = np.arange(n)
        if self.holdout:
            kept, test = hold_out(n, groups, self.holdout, self.seed)
            if self.test:
                return test
        if self.longtail:
            if groups is None:
                raise SourceError("--longtail needs classes, and this source has none")
            kept = long_tail(kept, groups, self.longtail, self.seed)
        return kept


@dataclass(frozen=True)
class Limited:
    """The rule of drawing `limit` samples at most of a selection, evenly spaced."""

    limit: int
    selection: Selection

    def __call__(self, n: int, groups: ClassGroups | None) -> Int64s:
        """Return sorted source indices, int64."""
        chosen = self.selection(n, groups) if callable(self.selection) else self.selection
        kept = np.arange(n) if chosen is None else chosen
        return kept[in_runs(len(kept), self.limit, 1)]


def hold_out(n: int, groups: ClassGroups | None, count_or_fraction: int | float, seed: int) -> tuple[Int64s, Int64s]:
    """Split the source indices 0 … n-1 into a train and a test set, both sorted, int64.

    count_or_fraction: size of the test set; below 1, its share of n. Every class gives the same number of samples, or
    all but one of its own if it has fewer; classes are taken whole only if that is not enough.
    Raises SourceError if either set would be empty.
    """
    count = round(count_or_fraction * n) if count_or_fraction < 1 else int(count_or_fraction)
    if not 0 < count < n:
        raise SourceError(f"{count:,} of {n:,} samples cannot be held out; hold out 1 to {n - 1:,}, or a fraction")
    of_sample = np.zeros(n, np.int64) if groups is None else groups.of_sample.astype(np.int64)
    present = np.bincount(of_sample)
    rng = np.random.default_rng([seed, _HOLD_OUT])
    wanted = _even_shares(np.maximum(present - 1, 0), count, rng)
    if (short := count - int(wanted.sum())) > 0:
        wanted += _even_shares(present - wanted, short, np.random.default_rng([seed, _WHOLE_CLASSES]))
    test = _drawn(np.arange(n), of_sample, wanted, rng)
    return np.setdiff1d(np.arange(n), test, assume_unique=True), test


def long_tail(indices: Int64s, groups: ClassGroups, ratio: float, seed: int) -> Int64s:
    """Cut class k of C to floor(n_max · ratio^(-k / (C-1))) of the given source indices; sorted, int64.

    n_max is the largest class's size; smaller classes keep all their samples. Classes are ordered as in groups.names,
    as for CIFAR100-LT (Cui et al., CVPR 2019, whose imbalance factor is 1 / ratio). Samples without a class are all
    kept. Raises SourceError unless ratio is above 1 and finite, and if no sample has a class.
    """
    if not 1 < ratio < np.inf:
        raise SourceError(f"a long-tail ratio of {ratio:g} is invalid; it must be finite and above 1")
    of_sample = groups.of_sample[indices].astype(np.int64)
    wanted = np.bincount(of_sample, minlength=len(groups.names))
    named = np.flatnonzero([bool(name) for name in groups.names])
    if not (present := wanted[named]).any():
        raise SourceError("a long tail needs classes, and no sample has one")
    rank = np.arange(len(named)) / max(len(named) - 1, 1)
    by_rule = np.floor(present.max() * float(ratio) ** -rank + 1e-9).astype(np.int64)  # 5, not 4.999…
    wanted[named] = np.minimum(by_rule, present)
    return _drawn(indices, of_sample, wanted, np.random.default_rng([seed, _LONG_TAIL]))


def swapped_between_classes(chosen: Int64s, classes: Int64s, rng: np.random.Generator) -> Int64s:
    """Return a random permutation of `chosen`, int64 [k], that replaces each sample by one of another class.

    classes: int64 [k], the samples' classes. Raises SourceError if more than a quarter of them are of one class.
    """
    if 4 * (largest := int(np.bincount(classes).max(initial=0))) > len(chosen):
        why = f"since {largest} of them are of one class; swap a larger share"
        raise SourceError(f"{len(chosen)} samples cannot be swapped between classes, {why}")
    order = rng.permutation(len(chosen))
    # A random exchange succeeds at least every other time, as three quarters are of other classes on both sides.
    while len(unchanged := np.flatnonzero(classes[order] == classes)):
        for place, other in zip(unchanged, rng.integers(len(chosen), size=len(unchanged)), strict=True):
            order[[place, other]] = order[[other, place]]
    return chosen[order]


def _even_shares(most: Int64s, count: int, rng: np.random.Generator) -> Int64s:
    """Split `count` evenly over the classes, at most most[k] each; the remainder is drawn, 1 per class."""
    low, high = 0, count
    while low < high:  # find the highest equal share whose total does not exceed `count`
        share = (low + high + 1) // 2
        low, high = (share, high) if np.minimum(most, share).sum() <= count else (low, share - 1)
    shares = np.minimum(most, low)
    able = np.flatnonzero(most > low)
    shares[rng.permutation(able)[: count - int(shares.sum())]] += 1
    return shares


def _drawn(indices: Int64s, of_sample: Int64s, wanted: Int64s, rng: np.random.Generator) -> Int64s:
    """Draw wanted[k] of the indices of each class k, sorted; of_sample are the indices' classes."""
    shuffled = rng.permutation(len(indices))
    by_class = shuffled[np.argsort(of_sample[shuffled], kind="stable")]
    classes = of_sample[by_class]
    place_in_class = np.arange(len(classes)) - np.searchsorted(classes, classes)
    return np.sort(indices[by_class[place_in_class < wanted[classes]]])
