"""The map of the embeddings twice: coloured by tau, and by class."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...inspection.features.embedding_map import EmbeddingMap
from ...inspection.temperatures.correlation import NO_GROUP
from .svg import COLOUR_MAP, GREY, GRID, INK, MARKERS, SIDES, is_narrow, legend, panels

CLASS_COLOURS = (
    *("#56b4e9", "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7"),
    *("#900860", "#38e800", "#9000f8", "#485000", "#f800f8", "#0008f8", "#e8c0e0"),
    *("#98d8a0", "#e00068", "#8078f8", "#5830a8", "#983800", "#b808b0", "#887800"),
)
"""The colours of Okabe and Ito that show on white and on black, the third of which, for tail classes, stands out; then
each time the colour farthest in OKLab from those before, from grey and from both papers."""
_HEIGHT, _NARROW_HEIGHT = 4.4, 8.0
_DOT, _MARK = 7, 30
_DOTS: dict[str, Any] = {"s": _DOT, "edgecolors": GREY, "linewidths": 0.2, "rasterized": True}
"""Without a rim the lowest tau would vanish on black, the highest on white."""
_CLIPPED = 0.02
"""Clip the colour scale: otherwise a few extremes would leave all others one colour."""


def draw_embedding_map(shown: EmbeddingMap, figure: Figure) -> None:
    """Draw the samples by tau if they have one, with the hottest and coldest marked, and by class if there are any.

    The names of classes, which are data, are not drawn but listed by the page.
    """
    has_tau = any(points.tau is not None for points in shown.points.values())
    draws = [_draw_tau] * has_tau + [_draw_classes] * (shown.colouring is not None or not has_tau)
    figure.set_figheight(_NARROW_HEIGHT * len(draws) / 2 if is_narrow(figure) else _HEIGHT)
    for place, (draw, axes) in enumerate(zip(draws, panels(figure, len(draws)), strict=True)):
        draw(figure, axes, shown)
        if place == 0 and len(shown.points) > 1:
            for side, marker in zip(shown.points, MARKERS, strict=False):
                axes.scatter([], [], s=2 * _DOT, marker=marker, color=INK, label=side, zorder=3)
        if draw is _draw_tau:
            _mark(axes, shown, SIDES, ("lowest tau", "highest tau"))
        else:
            _mark(axes, shown, (INK, INK), (None, None))
        _finish(axes)


def _draw_tau(figure: Figure, axes: Axes, shown: EmbeddingMap) -> None:
    of_sides = {side: points for side, points in shown.points.items() if points.tau is not None}
    low, high = np.quantile(np.concatenate([points.tau for points in of_sides.values()]), (_CLIPPED, 1 - _CLIPPED))
    drawn: Any = None
    for marker, points in zip(MARKERS, of_sides.values(), strict=False):
        x, y = points.xy.T
        drawn = axes.scatter(x, y, c=points.tau, cmap=COLOUR_MAP, vmin=low, vmax=high, marker=marker, **_DOTS)
    place: dict[str, Any] = {"location": "bottom" if is_narrow(figure) else "right", "aspect": 30, "pad": 0.02}
    bar = figure.colorbar(drawn, ax=axes, extend="both", label="tau (dimensionless)", **place)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


def _draw_classes(figure: Figure, axes: Axes, shown: EmbeddingMap) -> None:
    codes = np.full(len(shown.sample_ids), NO_GROUP) if shown.colouring is None else shown.colouring.codes
    # The rarest last, on top of the others.
    for code, colour in enumerate((GREY, *CLASS_COLOURS), start=NO_GROUP):
        chosen = codes == code
        for marker, points in zip(MARKERS, shown.points.values(), strict=False):
            x, y = points.xy[chosen].T
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
