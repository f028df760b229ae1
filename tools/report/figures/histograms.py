"""Histograms: of one column of the state, and of two temperatures per sample on a plane."""

from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure

from ...inspection import Float64s
from ...inspection.temperatures.correlation import Joint
from ...inspection.temperatures.distribution import Distribution
from ...inspection.temperatures.drift import Drift
from ...inspection.temperatures.survey import Side, Survey
from .svg import COLOUR_MAP, INK, SIDES, finish, is_narrow, legend, panels

BARS = 60
_DASHED: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (3, 2))}


class Panel(NamedTuple):
    """One histogram: title, values, and the axis's name and unit."""

    title: str
    values: Distribution
    axis: str
    whole_numbers: bool = False


def moving_averages(survey: Survey) -> dict[str, list[Panel]]:
    """Return log s, and u if the objective has a temperature per sample, by side; none with neither."""
    axes = {"log_s": "log s (natural log, no unit)", "u": "u, momentum of tau’s gradient (no unit)"}
    return {
        side: [
            Panel(f"{side} {name.replace('_', ' ')}", survey.fields[f"{side}/{name}"], axis)
            for name, axis in axes.items()
            if f"{side}/{name}" in survey.fields
        ]
        for side in dict.fromkeys(name.rpartition("/")[0] for name in survey.fields)
    }


def coverage(survey: Survey) -> list[Panel]:
    """Return how often and how long ago the samples were visited."""
    return [
        Panel("visits", survey.visits, "visits (steps that updated the sample)", whole_numbers=True),
        Panel("staleness", survey.staleness, "staleness (steps since the last visit)", whole_numbers=True),
    ]


def draw_tau_histograms(sides: list[Side], tau_init: float | None, figure: Figure) -> None:
    """Draw histograms of tau, one panel per side on common axes."""
    widest = max(sides, key=lambda side: side.tau.max - side.tau.min).tau
    lowest, highest = min(side.tau.min for side in sides), max(side.tau.max for side in sides)
    edges = np.linspace(lowest, highest, len(widest.edges(BARS))) if highest > lowest else widest.edges(1)
    shown = panels(figure, len(sides), shared=True)
    for axes, side, colour in zip(shown, sides, SIDES, strict=False):
        if tau_init is not None:
            axes.axvline(tau_init, zorder=4, label=f"start, tau_init = {tau_init:g}", **_DASHED)
        _draw_bars(axes, side.tau, edges, colour, side.name)
    if tau_init is not None:
        legend(shown[-1], right=True)
    figure.supxlabel("tau (dimensionless)")
    figure.supylabel("samples")


def draw_histograms(shown: list[Panel], counted: str, colour: int, figure: Figure) -> None:
    """Draw histograms side by side, each on its own axes; colour: that of the first (0) or second side (1)."""
    for axes, panel in zip(panels(figure, len(shown)), shown, strict=True):
        values, edges = panel.values, panel.values.edges(BARS, 0.005)  # outliers must not squeeze the rest
        if panel.whole_numbers:  # then edges lie between them, so that every bar holds the same number of them
            numbers = values.max - values.min + 1
            width = int(np.ceil(numbers / BARS))
            edges = (values.min - 0.5 + width * np.arange(int(np.ceil(numbers / width)) + 1)).astype(np.float64)
        _draw_bars(axes, values, edges, SIDES[colour], panel.title)
        axes.set_xlabel(panel.axis)
        axes.locator_params(axis="x", integer=panel.whole_numbers)
    figure.supylabel(counted)


def _draw_bars(axes: Axes, values: Distribution, edges: Float64s, colour: str, title: str) -> None:
    axes.stairs(values.histogram(edges), edges, fill=True, color=colour, zorder=3)
    axes.set_title(title, loc="left")
    finish(axes)
    axes.locator_params(axis="x", nbins=5)
    axes.yaxis.set_major_formatter("{x:,.0f}")


def draw_joint(joint: Joint, sides: list[str], figure: Figure) -> None:
    """Draw tau of the first side against tau of the second, with counts on a log scale."""
    figure.set_figwidth(min(figure.get_figwidth(), 5.0))  # a square plot
    _draw_planes(figure, {"": joint}, *(f"{side} tau (dimensionless)" for side in sides))


def draw_drift(drift: Drift, figure: Figure) -> None:
    """Draw the joint histogram of tau at the earlier and the later snapshot, one panel per side."""
    joints = {side.name: side.joint for side in drift.sides}
    _draw_planes(figure, joints, *(f"tau at {at.tag} (dimensionless)" for at in (drift.earlier, drift.later)))


def _draw_planes(figure: Figure, joints: dict[str, Joint], across: str, up: str) -> None:
    """Draw the first values on x, the second on y, on one colour scale; on the dashed diagonal both are equal."""
    down = len(joints) if is_narrow(figure) else 1
    if down > 1:
        figure.set_figheight(figure.get_figheight() * 1.6)  # stacked panels need more height to be readable
    # Without the map's darkest part, which would hide bins of one sample on dark paper.
    colour_map = ListedColormap(colormaps[COLOUR_MAP](np.linspace(0.3, 1, 256)))
    # At least 1 to 10, so that the scale has two ends even if no bin exceeds one sample.
    colours = LogNorm(1, max(10, *(int(joint.counts.max()) for joint in joints.values())))
    shown = panels(figure, len(joints))
    for axes, (name, joint) in zip(shown, joints.items(), strict=True):
        (x, y), counts = joint.edges, np.ma.masked_equal(joint.counts.T, 0)
        mesh = axes.pcolormesh(x, y, counts, norm=colours, cmap=colour_map, zorder=2, rasterized=True)
        axes.axline((x[0], x[0]), slope=1, zorder=3, **_DASHED)
        axes.set(xlim=x[[0, -1]], ylim=y[[0, -1]])
        axes.set_title(name, loc="left")
        finish(axes)
        axes.locator_params(nbins=5)
    figure.supxlabel(across)
    figure.supylabel(up)
    bar = figure.colorbar(mesh, ax=shown, format="{x:,.0f}", label="samples (log scale)", pad=0.02, aspect=20 * down)
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
