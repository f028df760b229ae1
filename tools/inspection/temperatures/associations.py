"""Associations of the lowest and the highest temperatures with other properties, as areas under the curve."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from .. import Bools, Float32s, Float64s, Int64s

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

End = Literal["lowest", "highest"]
ENDS: tuple[End, End] = ("lowest", "highest")


@dataclass(frozen=True)
class Association:
    """A property's association with one end of the temperatures, against all other samples."""

    end: End
    of: str
    area: float
    """Probability that a sample of the end has a higher value than another one, ties counted half: 0 … 1."""
    low: float
    high: float
    """Interval of the area, at LEVEL for all of the table together."""
    within: float | None
    """The area within the tenth of the samples, by number of near ones, that holds most of the end; None where that
    cannot be said, or makes no difference because the end does not go with near ones."""

    @property
    def is_notable(self) -> bool:
        """Whether the effect is beyond a small one, whatever the interval leaves open."""
        return self.low > 0.5 + SMALL or self.high < 0.5 - SMALL

    @property
    def stands(self) -> bool:
        """Whether it is also beyond a small one among samples that have as many near ones."""
        return self.within is None or (abs(self.within - 0.5) > SMALL and (self.within > 0.5) == (self.area > 0.5))


def associations(
    tau: Float32s, properties: Mapping[str, Float64s], near: str | None = None, groups: dict[str, Int64s] | None = None
) -> list[Association]:
    """Compare the lowest and the highest 2 % of temperatures with the rest, the strongest association first.

    tau: float32 [m]; 0 and infinity are ends of their own, NaN is left out. properties: float64 [m] each, by name; NaN
    where a sample has none. near: which of them is the number of near samples by the same features. groups: int64 [m],
    of properties that all samples of a group share, such as the size of their class. The intervals are DeLong's
    (Biometrics 1988), with groups Obuchowski's (Biometrics 1997), for as many comparisons as are made.
    """
    ends = ends_of(tau)
    asked = [(end, name) for end in ENDS for name in properties]
    z = float(ndtri(1 - LEVEL / (2 * max(1, len(asked)))))
    found = []
    for end, name in asked:
        values = properties[name]
        usable = ~np.isnan(tau) & ~np.isnan(values)
        is_end = ends[end] & usable
        if is_end.sum() < MIN_IN_END or (usable & ~is_end).sum() < MIN_IN_END:
            continue
        area, deviation = area_under_curve(values, is_end, usable & ~is_end, (groups or {}).get(name))
        found.append(Association(end, name, area, max(0.0, area - z * deviation), min(1.0, area + z * deviation), None))
    heaped = {each.end for each in found if each.of == near and each.is_notable and each.area > 0.5}
    for place, each in enumerate(found):
        if each.end in heaped and near is not None and each.of != near:
            within = _within(properties[each.of], ~np.isnan(tau), ends[each.end], properties[near])
            found[place] = replace(each, within=within)
    return sorted(found, key=lambda each: -abs(each.area - 0.5))


def ends_of(tau: Float32s) -> dict[End, Bools]:
    """Return the samples at each end of m temperatures, bool [m], with all of the last one's if they are not too many.

    Empty ends where there are too few temperatures.
    """
    known, found = ~np.isnan(tau), dict[End, Bools]()
    count = max(MIN_IN_END, round(END_SHARE * int(known.sum())))
    if known.sum() < 4 * count:
        return {end: np.zeros(len(tau), np.bool_) for end in ENDS}
    for end in ENDS:
        values = np.where(known, tau if end == "lowest" else -tau, np.inf)
        last = np.partition(values, count - 1)[count - 1]
        tied = known & (values <= last)
        found[end] = tied if tied.sum() <= MOST * known.sum() else known & (values < last)
    return found


def area_under_curve(values: Float64s, is_end: Bools, is_rest: Bools, groups: Int64s | None) -> tuple[float, float]:
    """Return the area under the receiver operating characteristic and its standard deviation.

    values: float64 [m]. groups: int64 [m], samples that do not count as independent; None: all do.
    """
    of_end, of_rest = values[is_end], values[is_rest]
    m, n = len(of_end), len(of_rest)
    ranks = rankdata(np.concatenate([of_end, of_rest]))
    placements = np.zeros(len(values)), np.zeros(len(values))
    placements[0][is_end] = (ranks[:m] - rankdata(of_end)) / n  # of each sample of the end, the share of the rest below
    placements[1][is_rest] = 1 - (ranks[m:] - rankdata(of_rest)) / m
    area = float(placements[0][is_end].mean())
    # What each sample, or group, adds to the deviation from the area.
    added = np.where(is_end, (placements[0] - area) / m, 0) + np.where(is_rest, (placements[1] - area) / n, 0)
    if groups is not None:
        added = np.bincount(groups[is_end | is_rest], added[is_end | is_rest])
    return area, float(np.sqrt((added**2).sum()))


def _within(values: Float64s, known: Bools, is_end: Bools, near: Float64s) -> float | None:
    usable = known & ~np.isnan(values)
    tenth = np.minimum((rankdata(near, "average") - 1) / len(near) // 0.1, 9).astype(int)
    most = int(np.bincount(tenth[is_end], minlength=10).argmax())
    inside = usable & (tenth == most)
    if (inside & is_end).sum() < MIN_IN_END or (inside & ~is_end).sum() < MIN_IN_END:
        return None
    return area_under_curve(values, inside & is_end, inside & ~is_end, None)[0]
