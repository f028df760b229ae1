"""One column's values in one pass with constant memory: their distribution, and the k smallest."""

from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import AsJson, Float32s, Float64s, Int64s

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
MANTISSA_BITS = 11
"""Two values that differ by less than 2^-11, 0.05 %, of themselves may count as equal."""
_DROPPED_BITS = 23 - MANTISSA_BITS
_BINS = 1 << (32 - _DROPPED_BITS)
_SIGN = np.uint32(1 << 31)
_MIN_PENDING = 1 << 16


class Distribution:
    """Counts float32 values in bins of relative width 2^-11 over the whole range of float32.

    Whole numbers up to 4,096 have a bin each. Non-finite values are counted separately.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)
        self._sum = 0.0
        self.not_finite = 0
        self.min, self.max = np.inf, -np.inf

    def add(self, values: Float32s) -> None:
        """Count `values`, float32 [any number]."""
        finite = values[np.isfinite(values)]
        self.not_finite += len(values) - len(finite)
        if not len(finite):
            return
        places = _place(finite)
        first = int(places.min())
        found = np.bincount(places - first)
        self._counts[first : first + len(found)] += found
        self._sum += float(finite.sum(dtype=np.float64))
        self.min, self.max = min(self.min, float(finite.min())), max(self.max, float(finite.max()))

    @cached_property
    def _up_to(self) -> Int64s:
        """int64 [bins + 1]: number of finite values below each bin. Use it only after the last `add`."""
        return np.concatenate(([0], np.cumsum(self._counts)))

    @property
    def count(self) -> int:
        """Number of finite values."""
        return int(self._up_to[-1])

    @property
    def mean(self) -> float:
        """Mean of the finite values; there must be at least one."""
        return self._sum / self.count

    def quantile(self, share: float) -> float:
        """Return a quantile of the finite values (at least one), to a relative precision of 2^-11."""
        rank = int(share * (self.count - 1))  # an integer: for a float, numpy would convert every bin
        place = int(np.searchsorted(self._up_to, rank, side="right")) - 1
        return float(np.clip(_lower_edge(place), self.min, self.max))

    def bin_of(self, share: float) -> tuple[float, float]:
        """Return the edges of the bin that holds a quantile; values in it cannot be distinguished."""
        place = _place(np.float32(self.quantile(share)))
        return float(_lower_edge(place)), float(_lower_edge(place + 1))

    def share_below(self, value: float) -> float:
        """Return the share of the finite values in lower bins, 0 … 1."""
        return float(self._up_to[_place(np.float32(value))] / self.count)

    def ranks(self, values: Float32s) -> Float64s:
        """Return the share of counted values below each of `values`, counting its own bin half; float64, 0 … 1."""
        places = _place(values)
        return (self._up_to[places] + self._up_to[places + 1]) / (2 * self.count)

    def share_at_most(self, bound: float) -> float:
        """Return the share of the finite values <= bound, to bin precision, 0 … 1."""
        return float(self._up_to[_place(np.float32(bound)) + 1] / self.count)

    def histogram(self, edges: ArrayLike) -> Int64s:
        """Count finite values between ascending edges [k + 1]; int64 [k]. The end bars include values beyond."""
        bins = np.asarray(edges)
        filled = np.flatnonzero(self._counts)
        values = np.clip(_lower_edge(filled), self.min, self.max).clip(bins[0], bins[-1])
        return np.histogram(values, bins=bins, weights=self._counts[filled])[0].astype(np.int64)

    def edges(self, most: int, trimmed: float = 0.0) -> Float64s:
        """Return edges of up to `most` equal bars from the lowest to the highest value, none finer than the bins.

        trimmed: share of the values to leave out at each end, 0 … 0.5.
        """
        low, high = (self.quantile(trimmed), self.quantile(1 - trimmed)) if trimmed else (self.min, self.max)
        first, last = _place(np.array([low, high], np.float32)).tolist()
        bars = min(most, 1 + (last - first) // 8)
        # If all values are equal, draw one bar of visible width.
        margin = 0.0 if high > low else abs(low) * 0.005 or 0.005
        return np.linspace(low - margin, high + margin, bars + 1)

    def figures(self) -> dict[str, float] | None:
        """Return the number of finite values, their mean, extremes and quantiles; None without any."""
        if not self.count:
            return None
        quantiles = {f"q{share:.2f}": self.quantile(share) for share in QUANTILES}
        return {"count": self.count, "mean": self.mean, "min": self.min, **quantiles, "max": self.max}


Figures = Annotated[Distribution, AsJson(Distribution.figures)]
"""A distribution that JSON has as its figures."""


def _place(values: Float32s | np.float32) -> Int64s:
    """Return each value's bin: the upper bits of its float32, mapped so that they ascend with the value."""
    # Adding 0 turns -0 into +0.
    bits = (values + np.float32(0)).view(np.uint32)
    ascending = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    return (ascending >> np.uint32(_DROPPED_BITS)).astype(np.int64)


def _lower_edge(places: ArrayLike) -> Float64s:
    ascending = np.asarray(places, np.uint32) << np.uint32(_DROPPED_BITS)
    bits = np.where(ascending & _SIGN, ascending ^ _SIGN, ~ascending)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


class Smallest:
    """Keeps the `count` ids with the smallest keys; ties go to the lowest tie-breakers, then to the lowest ids.

    Ids must be added in ascending order.
    """

    def __init__(self, count: int) -> None:
        self._count, self._pending = count, 0
        self._parts = [(np.empty(0, np.int64), np.empty(0), np.empty(0))]  # ids, keys and tie-breakers
        self._limit = (np.inf, -np.inf)  # key and tie-breaker at or above which nothing can be selected

    def add(self, ids: Int64s, keys: NDArray[np.floating], breakers: NDArray[np.floating] | None = None) -> None:
        """Add ids, int64 [m], all higher than earlier ones, with their keys, [m], and their tie-breakers, [m]."""
        key, breaker = self._limit
        breakers = np.zeros(len(keys)) if breakers is None else breakers
        keep = (keys < key) | ((keys == key) & (breakers < breaker))
        broken = np.where(np.isnan(breakers[keep]), np.inf, breakers[keep])  # nothing is below a limit of NaN
        self._parts.append((ids[keep], keys[keep].astype(np.float64), broken.astype(np.float64)))
        self._pending += len(broken)
        if self._pending > max(_MIN_PENDING, self._count):
            self.chosen()

    def chosen(self) -> tuple[Int64s, Float64s]:
        """Return the ids, int64 [at most count], ordered by key and tie-breaker, and the keys, float64."""
        ids, keys, breakers = map(np.concatenate, zip(*self._parts, strict=True))
        if len(keys) > self._count > 0:  # sorting takes longest, so only those that can be chosen are
            near = keys <= np.partition(keys, self._count - 1)[self._count - 1]
            ids, keys, breakers = ids[near], keys[near], breakers[near]
        # Ids ascend among equals, so a stable sort, which lexsort is, keeps the lowest ids first.
        order = np.lexsort((breakers, keys))[: self._count]
        ids, keys, breakers = ids[order], keys[order], breakers[order]
        self._parts, self._pending = [(ids, keys, breakers)], 0
        if len(order) == self._count and self._count:
            self._limit = float(keys[-1]), float(breakers[-1])
        return ids, keys
