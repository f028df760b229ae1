"""Lines: tau over the steps of a run, of all samples and of single ones, the weights p* of negatives by rank, and
differences of two runs' scores."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ....state_store.schema import VISITS
from ...inspection.temperatures.samples import StateAt
from ...inspection.temperatures.through_time import ThroughTime
from .embedding_map import CLASS_COLOURS
from .svg import GREY, INK, MARKERS, PAPER, SIDES, finish, is_narrow, legend, panels

BANDS = ((0, 4, 0.22, "5–95 %"), (1, 3, 0.45, "25–75 %"))
"""Indices of the lower and upper quantile, opacity, label."""


def draw_tau_over_time(through_time: ThroughTime, figure: Figure) -> None:
    """Draw quantiles of tau over the visited samples at every snapshot, one panel per side.

    A single snapshot is drawn as a box.
    """
    steps = np.array([moment.step for moment in through_time.moments], np.float64)
    shown = panels(figure, len(through_time.sides), shared=True)
    for axes, side, colour in zip(shown, through_time.sides, SIDES, strict=False):
        at, quantiles = steps, np.array([moment.tau[side].quantiles for moment in through_time.moments]).T
        axes.plot(at, quantiles[2], color=colour, marker="o", markersize=3.5, linewidth=1.6, label="median", zorder=4)
        if len(steps) == 1:
            # A band over one step would have no width.
            axes.set_xlim(steps[0] - 1, steps[0] + 1)
            axes.set_xticks(steps)
            at, quantiles = steps[0] + np.array([-0.2, 0.2]), np.repeat(quantiles, 2, axis=1)
            axes.plot(at, quantiles[2], color=colour, linewidth=1.6, zorder=4)
        for low, high, alpha, name in BANDS:
            look: dict[str, Any] = {"color": colour, "alpha": alpha, "linewidth": 0, "label": name, "zorder": 3}
            axes.fill_between(at, quantiles[low], quantiles[high], **look)
        axes.set_title(side, loc="left")
        _finish_steps(axes)
    shown[0].set_ylim(bottom=0)
    # Beside the panel's name, on the same line.
    legend(shown[-1], right=True, ncols=3, handlelength=1.2, handletextpad=0.4, columnspacing=1.0)
    figure.supxlabel("step")
    figure.supylabel("tau (dimensionless)")


def draw_history(history: Sequence[StateAt], sides: Sequence[str], figure: Figure) -> None:
    """Draw tau of one sample over the steps, one line per side; hollow markers before its first visit.

    history: at least one snapshot.
    """
    steps = np.array([at.snapshot.step for at in history])
    visited = np.array([at.values[VISITS] > 0 for at in history])
    axes = figure.subplots()
    for side, colour, marker in zip(sides, SIDES, MARKERS, strict=False):
        tau = np.array([at.values[f"{side}/tau"] for at in history])
        axes.plot(steps, tau, color=colour, marker=marker, markersize=5, linewidth=1.4, label=side, zorder=3)
        axes.scatter(steps[~visited], tau[~visited], s=25, color=PAPER, edgecolors=colour, marker=marker, zorder=4)
    _finish_steps(axes)
    if len(steps) == 1:
        axes.set_xticks(steps)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="step", ylabel="tau (dimensionless)")
    if len(sides) > 1:
        legend(axes, ncols=2)


def draw_share(shares: Mapping[int, float], label: str, figure: Figure) -> None:
    """Draw a share, 0 … 1, at the steps of snapshots, at least one."""
    axes = figure.subplots()
    axes.plot([*shares], [*shares.values()], color=SIDES[0], marker="o", markersize=4, linewidth=1.6, zorder=3)
    _finish_steps(axes)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_ylim(0, 1.1 * max(shares.values()) or 1)
    axes.set(xlabel="step", ylabel=label)


def _finish_steps(axes: Axes) -> None:
    finish(axes)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def draw_curves(sides: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], figure: Figure) -> None:
    """Draw p* over the ranks of the negatives, one panel a side, one line a sample.

    sides: side of the state -> words on a sample -> points, as Ranking.curve.
    """
    columns = 1 if is_narrow(figure) else 2
    figure.set_figheight(figure.get_figheight() + 0.2 / columns * sum(map(len, sides.values())))  # for the legends
    for axes, (side, curves) in zip(panels(figure, len(sides), shared=True), sides.items(), strict=True):
        for colour, (words, points) in zip(CLASS_COLOURS, curves.items(), strict=False):
            axes.loglog(*zip(*points, strict=True), color=colour, linewidth=1.6, label=words, zorder=3)
        even = 1 / points[-1][0]
        axes.axhline(even, color=GREY, linewidth=1, linestyle="--", label="all alike")
        finish(axes)
        axes.tick_params(which="minor", length=0)
        axes.set(ylabel=f"p* ({side})", ylim=(even / 100, 1))
        legend(axes, ncols=columns)
    figure.supxlabel("rank of the negative")


def draw_effect(shown: dict[str, dict[str, dict[str, float] | None]], figure: Figure) -> None:
    """Draw dots with 95 % intervals, thin if not paired; shown: score, at least one -> band -> as in Differences."""
    bands = list(next(iter(shown.values())))
    figure.set_figheight((0.9 + 0.24 * len(shown)) * (len(bands) if is_narrow(figure) else 1))
    every = panels(figure, len(bands), shared=True)
    for axes, band in zip(every, bands, strict=True):
        finish(axes)
        axes.grid(axis="x", linewidth=0.8, zorder=0)
        axes.axvline(0, color=INK, linewidth=0.8, zorder=2)
        axes.plot([-1, 1], [0, 0], alpha=0)  # a point at least, or equal scores would have ticks of rounding errors
        for row, found in enumerate(of_band[band] for of_band in shown.values()):
            if found:
                for width, line in (("unpaired_half_width", 0.8), ("half_width", 2.6)):
                    look: dict[str, Any] = {"xerr": 100 * found[width], "elinewidth": line, "color": SIDES[0]}
                    axes.errorbar(100 * found["mean"], row, fmt="o", markersize=4.5, zorder=3, **look)
        axes.set_title(band, loc="left")
        axes.xaxis.set_major_formatter("{x:+g}")
        axes.locator_params(axis="x", nbins=5)
    every[0].set(yticks=range(len(shown)), yticklabels=list(shown), ylim=(len(shown) - 0.5, -0.5))
    figure.supxlabel("B − A (points)")
