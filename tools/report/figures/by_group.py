"""Mean tau of every group against the group's size."""

from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from ...inspection import Bools, Float64s, Int64s
from ...inspection.temperatures.groups import MIN_FOR_INTERVAL, TauGroups
from ...inspection.temperatures.survey import Side
from ...printing import plain_text
from .svg import INK, MARKERS, PAPER, SIDES, WIDE, finish, legend

MAX_INTERVALS = 200
"""With more groups, intervals would cover the dots, and dots one another: medians are drawn instead."""
NAMED = 12
"""With more groups, their names would cover one another."""
_LEVELS = 12
"""Ranges of sizes with a median each, at most."""
_LONGEST_WORD = 20
"""Characters of a column's name."""


def draw_tau_by_group(sides: list[Side], groups: TauGroups, figure: Figure) -> None:
    """Draw a dot per group and side, with 95 % intervals; with medians by size instead if the groups are many."""
    axes = figure.subplots()
    for place, (side, colour, marker) in enumerate(zip(sides, SIDES, MARKERS, strict=False)):
        look: dict[str, Any] = {"color": colour, "marker": marker, "label": side.name}
        if len(groups.names) > MAX_INTERVALS:
            way = 0.0 if len(sides) == 1 else (-1.0, 1.0)[place]
            _draw_many(axes, groups.sizes, groups.tau[side.name].mean, way, look)
        else:
            (mean, half_width, *_), few, sizes = groups.tau[side.name], few_visited(groups), groups.sizes
            axes.scatter(sizes[~few], mean[~few], s=26, alpha=0.75, linewidths=0, zorder=3, **look)
            hollow: dict[str, Any] = {"marker": marker, "facecolors": "none", "edgecolors": colour}
            axes.scatter(sizes[few], mean[few], s=22, alpha=0.75, linewidths=1, zorder=3, **hollow)
            bars: dict[str, Any] = {"fmt": "none", "ecolor": colour, "elinewidth": 1}
            axes.errorbar(sizes[~few], mean[~few], yerr=half_width[~few], alpha=0.35, zorder=2, **bars)
    axes.set_xscale("log")
    word = plain_text(groups.word, _LONGEST_WORD)
    # A column name may contain $, which would be read as mathematics.
    axes.set_xlabel(f"{word} size (samples, log scale)", parse_math=False)
    axes.set_ylabel(f"mean tau of the {word} (dimensionless)", parse_math=False)
    _plain_size_ticks(axes, figure.get_figwidth(), groups.sizes)
    axes.set_ylim(bottom=max(0, axes.get_ylim()[0]))  # tau is never negative, but an interval may reach below 0
    finish(axes)
    if len(sides) > 1:
        legend(axes, ncols=2, handletextpad=0.2)
    if len(groups.names) <= NAMED:
        _name_dots(figure, axes, groups, groups.tau[sides[0].name].mean)


def few_visited(groups: TauGroups) -> Bools:
    """Return which groups have a mean tau but too few visited samples for an interval, bool [groups]."""
    return np.asarray((groups.visited > 0) & (groups.visited < MIN_FOR_INTERVAL))


def _name_dots(figure: Figure, axes: Axes, groups: TauGroups, means: Float64s) -> None:
    """Write each group's name beside its dot where it fits and covers no other name, or nowhere."""
    axes.margins(x=0.3)
    look: dict[str, Any] = {"fontsize": "small", "color": INK, "parse_math": False, "va": "center"}
    figure.draw_without_rendering()  # lays the figure out
    covered: list[Bbox] = []
    for place in np.argsort(means)[: int((~np.isnan(means)).sum())]:
        words, dot = plain_text(groups.names[place], _LONGEST_WORD), (groups.sizes[place], means[place])
        for up, (aside, side) in product((0, 10, -10), ((6, "left"), (-6, "right"))):
            name = axes.annotate(words, dot, (aside, up), textcoords="offset points", ha=side, **look)
            name.set_in_layout(False)  # long names would leave no room for the axes
            box = name.get_window_extent()
            is_inside = axes.bbox.x0 < box.x0 and box.x1 < figure.bbox.x1
            if is_inside and not any(box.overlaps(other) for other in covered):
                covered.append(box)
                break
            name.remove()


def _draw_many(axes: Axes, sizes: Int64s, means: Float64s, way: float, look: dict[str, Any]) -> None:
    """Draw light dots, and over them the median and the quartiles of groups of about one size.

    way: where dots of one size go, which would lie on one another: -1 left, 1 right, 0 to both sides.
    """
    seen = ~np.isnan(means)
    sizes, means = sizes[seen], means[seen]
    if not len(sizes):
        axes.scatter([], [], **look)
        return
    widest = 0.035 * max(1.0, float(np.log(sizes.max() / sizes.min())))  # a share of the axis
    aside = np.random.default_rng(2023).uniform(-1 if way == 0 else 0.1, 1, len(sizes)) * (way or 1) * widest
    dots = look | {"label": None, "rasterized": True}
    axes.scatter(sizes * np.exp(aside), means, s=5, alpha=0.25, linewidths=0, zorder=2, **dots)
    level = _level(sizes)
    quartiles = np.array([np.quantile(means[level == one], (0.25, 0.5, 0.75)) for one in np.unique(level)])
    middles = np.array([np.exp(np.log(sizes[level == one]).mean()) for one in np.unique(level)])
    (low, median, high), at = quartiles.T, middles * np.exp(way * widest / 2)
    marks: dict[str, Any] = {"linestyle": "none", "markersize": 6, "markeredgecolor": PAPER, "elinewidth": 2}
    axes.errorbar(at, median, yerr=(median - low, high - median), zorder=3, **look, **marks)


def _level(sizes: Int64s) -> Int64s:
    """Return to which range of sizes each group belongs, int64 [groups]: its own size if there are few sizes."""
    found, place = np.unique(sizes, return_inverse=True)
    if len(found) <= _LEVELS:
        return place
    return np.digitize(sizes, np.geomspace(found[0], found[-1] + 1, _LEVELS + 1)).astype(np.int64)


def _plain_size_ticks(axes: Axes, width: float, sizes: Int64s) -> None:
    """Set ticks at 1, 2, 5, 10, …, written as counts, not powers of ten; fewer if sizes span decades or on a phone."""
    decades, found = np.log10(sizes.max() / sizes.min()), np.unique(sizes)
    if decades < 1 and len(found) <= _LEVELS // 2:
        axes.xaxis.set_major_locator(FixedLocator(found.tolist()))
    else:
        room = decades * WIDE[0] / width
        subs = (1, 2, 5) if room <= 1.5 else (1, 3) if room <= 3 else (1,)
        axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}" if size >= 1 else ""))
