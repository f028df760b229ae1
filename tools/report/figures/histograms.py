"""Histograms of tau, of the rest of the state, of visits and of staleness."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...inspection.distribution import Distribution
from ...inspection.joint import Joint
from ...inspection.survey import Side
from .plane import draw_plane, sample_colours
from .style import Style, drawing, finish

BARS = 60
TRIMMED = 0.005
"""Share of the values at each end put into the outermost bar, so that outliers do not squeeze the rest."""
SQUARE_WIDTH = 5.0
"""Inches, for a square plot."""


class Panel(NamedTuple):
    """One histogram: title, values, and the axis's name and unit."""

    title: str
    values: Distribution
    axis: str
    whole_numbers: bool = False


def draw_tau_histograms(sides: list[Side], tau_init: float | None, style: Style) -> bytes:
    """Draw histograms of tau over the visited samples as PNG, one panel per side on common axes."""
    widest = max(sides, key=lambda side: side.tau.max - side.tau.min).tau
    lowest, highest = min(side.tau.min for side in sides), max(side.tau.max for side in sides)
    edges = np.linspace(lowest, highest, len(widest.edges(BARS))) if highest > lowest else widest.edges(1)
    with drawing(style) as (figure, png):
        across = 1 if style.narrow else len(sides)
        panels = figure.subplots(len(sides) // across, across, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, side, colour in zip(panels, sides, style.sides, strict=False):
            axes.stairs(side.tau.histogram(edges), edges, fill=True, color=colour, zorder=3)
            axes.set_title(side.name, loc="left")
            if tau_init is not None:
                axes.axvline(tau_init, color=style.ink, linewidth=1, linestyle=(0, (3, 2)), zorder=4,
                             label=f"start, tau_init = {tau_init:g}")  # fmt: skip
            finish(axes, style)
            axes.locator_params(axis="x", nbins=5)
            axes.yaxis.set_major_formatter("{x:,.0f}")
        if tau_init is not None:
            panels[-1].legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
        figure.supxlabel("tau (dimensionless)")
        figure.supylabel("visited samples")
    return png.getvalue()


def draw_histograms(panels: list[Panel], counted: str, colour: int, style: Style) -> bytes:
    """Draw histograms side by side, each on its own axes, as PNG; colour: that of the first (0) or second side (1)."""
    with drawing(style) as (figure, png):
        across = 1 if style.narrow else len(panels)
        shown = figure.subplots(len(panels) // across, across, squeeze=False).ravel()
        for axes, panel in zip(shown, panels, strict=True):
            edges = _whole_edges(panel.values) if panel.whole_numbers else panel.values.edges(BARS, TRIMMED)
            axes.stairs(panel.values.histogram(edges), edges, fill=True, color=style.sides[colour], zorder=3)
            axes.set_title(panel.title, loc="left")
            axes.set_xlabel(panel.axis)
            finish(axes, style)
            axes.locator_params(axis="x", nbins=5, integer=panel.whole_numbers)
            axes.yaxis.set_major_formatter("{x:,.0f}")
        figure.supylabel(counted)
    return png.getvalue()


def _whole_edges(values: Distribution) -> NDArray[np.float64]:
    """Return edges between whole numbers, so that every bar holds the same number of them."""
    numbers = values.max - values.min + 1
    width = int(np.ceil(numbers / BARS))
    return np.asarray(values.min - 0.5 + width * np.arange(int(np.ceil(numbers / width)) + 1), np.float64)


def draw_joint(joint: Joint, sides: list[str], style: Style) -> bytes:
    """Draw tau of the first side against tau of the second as PNG, with counts on a log scale."""
    with drawing(replace(style, width=min(style.width, SQUARE_WIDTH))) as (figure, png):
        axes = figure.subplots()
        mesh = draw_plane(axes, joint, sample_colours([joint]), style)
        axes.set_xlabel(f"{sides[0]} tau (dimensionless)")
        axes.set_ylabel(f"{sides[1]} tau (dimensionless)")
        bar = figure.colorbar(mesh, ax=axes, label="visited samples (log scale)", format="{x:,.0f}")
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)
    return png.getvalue()
