"""What the lowest and the highest temperatures go with: areas under the curve of a sample's other properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import rankdata

END_SHARE = 0.02
"""Share of the samples that make an end."""
MOST = 0.25
"""Share up to which samples of one temperature, as those for which none is low enough, are an end."""
MIN_IN_END = 20
"""Fewer samples go with something by chance, whatever an interval says."""
LEVEL = 0.05
"""Probability that any of the intervals of one table misses its area."""
SMALL = 0.1
"""Distance of an area from ½ up to which an effect is called small."""
CROWDED_SHARE = 0.1

End = Literal["lowest", "highest"]
ENDS: tuple[End, End] = ("lowest", "highest")


@dataclass(frozen=True)
class Association:
    """How a property tells the samples at one end of the temperatures from all others."""

    end: End
    of: str
    """The property's name."""
    area: float
    """Probability that a sample of the end has a higher value than another one, ties counted half: 0 … 1."""
    low: float
    high: float
    """Interval of the area, at LEVEL for all of the table together."""
    within: float | None
    """The area within the tenth of the samples, by number of near ones, that holds most of the end; None where the
    end has too few samples there, or for near ones themselves."""

    @property
    def is_said(self) -> bool:
        """Whether the effect is beyond a small one, whatever the interval leaves open."""
        return self.low > 0.5 + SMALL or self.high < 0.5 - SMALL

    @property
    def holds_within(self) -> bool:
        """Whether it is also beyond a small one among samples that have as many near ones."""
        return self.within is not None and abs(self.within - 0.5) > SMALL and (self.within > 0.5) == (self.area > 0.5)


def associations(
    tau: NDArray[np.float32], properties: Mapping[str, NDArray[np.float64]], near: NDArray[np.float64] | None = None
) -> list[Association]:
    """Compare the lowest and the highest 2 % of temperatures with the rest, the strongest association first.

    tau: float32 [m]; 0 and infinity are ends of their own, NaN is left out. properties: float64 [m] each, by name; NaN
    where a sample has none. near: float64 [m], the number of near samples by the same features.
    The intervals are DeLong's (Biometrics 1988), for as many comparisons as are made. Samples count as independent:
    where a property belongs to a class, as its size, the interval is too narrow for few classes.
    """
    known = ~np.isnan(tau)
    count = max(MIN_IN_END, round(END_SHARE * int(known.sum())))
    if known.sum() < 4 * count:
        return []
    asked: list[tuple[End, str]] = [(end, name) for end in ENDS for name in properties]
    z = float(ndtri(1 - LEVEL / (2 * max(1, len(asked)))))
    found = []
    for end, name in asked:
        values = properties[name]
        usable = known & ~np.isnan(values)
        is_end = _end(tau, usable, count, end)
        if is_end.sum() < MIN_IN_END:
            continue
        area, deviation = area_under_curve(values[is_end], values[usable & ~is_end])
        within = None if near is None else _within(values, usable, is_end, near)
        found.append(
            Association(end, name, area, max(0.0, area - z * deviation), min(1.0, area + z * deviation), within)
        )
    return sorted(found, key=lambda each: -abs(each.area - 0.5))


def area_under_curve(of_end: NDArray[np.float64], of_rest: NDArray[np.float64]) -> tuple[float, float]:
    """Return the area under the receiver operating characteristic and its standard deviation, after DeLong et al."""
    m, n = len(of_end), len(of_rest)
    ranks = rankdata(np.concatenate([of_end, of_rest]))
    above_rest = (ranks[:m] - rankdata(of_end)) / n  # of each sample of the end, the share of the rest below it
    below_end = 1 - (ranks[m:] - rankdata(of_rest)) / m
    variance = (above_rest.var(ddof=1) / m if m > 1 else 0.25) + (below_end.var(ddof=1) / n if n > 1 else 0.25)
    return float(above_rest.mean()), float(variance**0.5)


def _end(tau: NDArray[np.float32], usable: NDArray[np.bool_], count: int, end: str) -> NDArray[np.bool_]:
    """bool [m]: the samples at one end, with all of the last one's temperature if they are no more than MOST."""
    values = np.where(usable, tau if end == "lowest" else -tau, np.inf)
    last = np.partition(values, count - 1)[count - 1]
    tied: NDArray[np.bool_] = usable & (values <= last)
    return tied if tied.sum() <= MOST * usable.sum() else usable & (values < last)


def _within(
    values: NDArray[np.float64], usable: NDArray[np.bool_], is_end: NDArray[np.bool_], near: NDArray[np.float64]
) -> float | None:
    tenth = np.minimum((rankdata(near, "average") - 1) / len(near) // CROWDED_SHARE, 9).astype(int)
    most = int(np.bincount(tenth[is_end], minlength=10).argmax())
    inside = usable & (tenth == most)
    if (inside & is_end).sum() < MIN_IN_END or (inside & ~is_end).sum() < MIN_IN_END:
        return None
    return area_under_curve(values[inside & is_end], values[inside & ~is_end])[0]
