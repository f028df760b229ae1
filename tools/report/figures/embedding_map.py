"""The map of the embeddings twice: coloured by tau, and by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...inspection.features.embedding_map import Colouring, EmbeddingMap
from ...inspection.temperatures.correlation import NO_GROUP
from ...inspection.temperatures.survey import Side
from .svg import COLOUR_MAP, GREY, GRID, INK, MARKERS, SIDES, is_narrow, legend, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLASS_COLOURS = ("#56b4e9", "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7")
"""The colours of Okabe and Ito that show on white and on black; the third, for tail classes, stands out."""
_HEIGHT, _NARROW_HEIGHT = 4.4, 8.0
_DOT, _MARK = 7, 30
_DOTS: dict[str, Any] = {"s": _DOT, "edgecolors": GREY, "linewidths": 0.2, "rasterized": True}
"""Without a rim the lowest tau would vanish on black, the highest on white."""
_CLIPPED = 0.02
"""Clip the colour scale: otherwise a few extremes would leave all others one colour."""


def draw_embedding_map(shown: EmbeddingMap, sides: list[Side], figure: Figure) -> None:
    """Draw the samples by tau and, if there are classes, by class, with the hottest and coldest marked."""
    count = 2 if shown.colouring else 1
    figure.set_figheight(_NARROW_HEIGHT * count / 2 if is_narrow(figure) else _HEIGHT)
    by_tau, *by_class = panels(figure, count)
    _draw_tau(figure, by_tau, shown, sides)
    _mark(by_tau, shown, SIDES, ("lowest tau", "highest tau"))
    if by_class and shown.colouring:
        _draw_classes(by_class[0], shown, shown.colouring, sides)
        _mark(by_class[0], shown, (INK, INK), (None, None))
    for axes in (by_tau, *by_class):
        _finish(axes)


def colour_legend(colouring: Colouring) -> list[tuple[str, str, str]]:
    """Return each class's colour (#rrggbb, on light and on dark paper), label in the figure, and name.

    The name of a class comes from the data and is not drawn.
    """
    drawn = [
        f"class {place}" if colouring.are_classes else f"{name} classes"
        for place, name in enumerate(colouring.names, start=1)
    ]
    return list(zip(CLASS_COLOURS, drawn, colouring.names, strict=False))


def class_names(colouring: Colouring) -> str:
    """Return which class each label in the figure stands for."""
    return "; ".join(f"{drawn}: {name}" for _, drawn, name in colour_legend(colouring))


def _draw_tau(figure: Figure, axes: Axes, shown: EmbeddingMap, sides: list[Side]) -> None:
    tau = np.concatenate([points.tau for points in shown.points.values()])
    low, high = np.quantile(tau, (_CLIPPED, 1 - _CLIPPED))
    drawn: Any = None
    for side, marker in zip(sides, MARKERS, strict=False):
        points = shown.points[side.name]
        x, y = points.xy.T
        drawn = axes.scatter(x, y, c=points.tau, cmap=COLOUR_MAP, vmin=low, vmax=high, marker=marker, **_DOTS)
        if len(sides) > 1:
            axes.scatter([], [], s=2 * _DOT, marker=marker, color=INK, label=side.name, zorder=3)
    place: dict[str, Any] = {"location": "bottom" if is_narrow(figure) else "right", "aspect": 30, "pad": 0.02}
    bar = figure.colorbar(drawn, ax=axes, extend="both", label="tau (dimensionless)", **place)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


def _draw_classes(axes: Axes, shown: EmbeddingMap, colouring: Colouring, sides: list[Side]) -> None:
    names = [(NO_GROUP, GREY, "no class"), *((k, c, n) for k, (c, n, _) in enumerate(colour_legend(colouring)))]
    # The rarest last, on top of the others.
    for code, colour, name in names:
        chosen = colouring.codes == code
        if chosen.any():
            axes.scatter([], [], s=2 * _DOT, marker="s", color=colour, label=name, zorder=3)
            for side, marker in zip(sides, MARKERS, strict=False):
                x, y = shown.points[side.name].xy[chosen].T
                axes.scatter(x, y, c=colour, marker=marker, **_DOTS)


def _mark(axes: Axes, shown: EmbeddingMap, colours: Sequence[str], labels: Sequence[str | None]) -> None:
    """Mark the coldest samples with triangles pointing down, the hottest with triangles pointing up."""
    points = shown.points.values()
    cold = np.concatenate([of_side.xy[of_side.coldest] for of_side in points])
    hot = np.concatenate([of_side.xy[of_side.hottest] for of_side in points])
    for xy, marker, colour, label in zip((cold, hot), "v^", colours, labels, strict=True):
        if len(xy):
            look: dict[str, Any] = {"facecolors": "none", "edgecolors": colour, "linewidths": 0.9, "label": label}
            axes.scatter(xy[:, 0], xy[:, 1], s=_MARK, marker=marker, **look)


def _finish(axes: Axes) -> None:
    axes.set_aspect("equal", adjustable="datalim")
    axes.set(xticks=[], yticks=[], xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
    axes.spines[:].set_color(GRID)
    if axes.get_legend_handles_labels()[0]:
        legend(axes, ncols=2, handletextpad=0.2, columnspacing=1)
