"""Mean tau of every group against the group's size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...inspection.groups import Groups
from ...inspection.survey import Side
from .style import MARKERS, Style, finish, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY_GROUPS = 500
MAX_INTERVALS = 200
"""With more groups, intervals would cover the dots."""


def draw_tau_by_group(sides: list[Side], groups: Groups, figure: Figure, style: Style) -> None:
    """Draw a dot per group and side, with 95 % intervals if the groups are few."""
    axes = figure.subplots()
    size = 9 if len(groups.names) > MANY_GROUPS else 26
    for side, colour, marker in zip(sides, style.sides, MARKERS, strict=False):
        tau = groups.tau[side.name]
        axes.scatter(
            groups.sizes, tau.mean,
            s=size, color=colour, marker=marker, alpha=0.75, linewidths=0, label=side.name, zorder=3,
        )  # fmt: skip
        if len(groups.names) <= MAX_INTERVALS:
            axes.errorbar(
                groups.sizes, tau.mean, yerr=np.nan_to_num(tau.half_width),
                fmt="none", ecolor=colour, alpha=0.35, elinewidth=1, zorder=2,
            )  # fmt: skip
    axes.set_xscale("log")
    # A column name may contain $, which would be read as mathematics.
    axes.set_xlabel(f"{groups.word} size (samples, log scale)", parse_math=False)
    axes.set_ylabel(f"mean tau of the {groups.word} (dimensionless)", parse_math=False)
    _plain_size_ticks(axes, groups.sizes)
    axes.set_ylim(bottom=max(0, axes.get_ylim()[0]))  # tau is never negative, but an interval may reach below 0
    finish(axes, style)
    if len(sides) > 1:
        legend(axes, ncols=2, handletextpad=0.2)


def _plain_size_ticks(axes: Axes, sizes: NDArray[np.int64]) -> None:
    """Set ticks at 1, 2, 5, 10, …, written as counts, not powers of ten; sparser if sizes span many decades."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    decades = np.log10(sizes.max() / sizes.min())
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades <= 3 else (1,), numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
