"""Histograms of tau, of the rest of the state, of visits and of staleness."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...inspection.distribution import Distribution
from ...inspection.survey import Side
from .style import Style, drawing, finish, legend, panels

BARS = 60
TRIMMED = 0.005
"""Share of the values at each end put into the outermost bar, so that outliers do not squeeze the rest."""


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
        shown = panels(figure, len(sides), style, shared=True)
        for axes, side, colour in zip(shown, sides, style.sides, strict=False):
            axes.stairs(side.tau.histogram(edges), edges, fill=True, color=colour, zorder=3)
            axes.set_title(side.name, loc="left")
            if tau_init is not None:
                axes.axvline(tau_init, color=style.ink, linewidth=1, linestyle=(0, (3, 2)), zorder=4,
                             label=f"start, tau_init = {tau_init:g}")  # fmt: skip
            finish(axes, style)
            axes.locator_params(axis="x", nbins=5)
            axes.yaxis.set_major_formatter("{x:,.0f}")
        if tau_init is not None:
            legend(shown[-1], right=True)
        figure.supxlabel("tau (dimensionless)")
        figure.supylabel("visited samples")
    return png.getvalue()


def draw_histograms(shown: list[Panel], counted: str, colour: int, style: Style) -> bytes:
    """Draw histograms side by side, each on its own axes, as PNG; colour: that of the first (0) or second side (1)."""
    with drawing(style) as (figure, png):
        for axes, panel in zip(panels(figure, len(shown), style), shown, strict=True):
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
