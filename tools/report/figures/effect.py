"""How far the scores of one run are above those of another: a row per score, a panel per band."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .style import Style, finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_effect(shown: dict[str, dict[str, dict[str, float] | None]], figure: Figure, style: Style) -> None:
    """Draw dots with 95 % intervals, thin if not paired; shown: score, at least one -> band -> as in Differences."""
    bands = list(next(iter(shown.values())))
    figure.set_figheight(0.9 + 0.24 * len(shown))
    every = figure.subplots(1, len(bands), sharex=True, sharey=True, squeeze=False)[0]
    for axes, band in zip(every, bands, strict=True):
        finish(axes, style)
        axes.grid(axis="x", linewidth=0.8, zorder=0)
        axes.axvline(0, color=style.ink, linewidth=0.8, zorder=2)
        axes.plot([-1, 1], [0, 0], alpha=0)  # a point at least, or equal scores would have ticks of rounding errors
        for row, found in enumerate(of_band[band] for of_band in shown.values()):
            if found:
                for width, line in (("unpaired_half_width", 0.8), ("half_width", 2.6)):
                    look = {"xerr": 100 * found[width], "elinewidth": line, "color": style.sides[0]}
                    axes.errorbar(100 * found["mean"], row, fmt="o", markersize=4.5, zorder=3, **look)
        axes.set_title(band, loc="left")
        axes.xaxis.set_major_formatter("{x:+g}")
        axes.locator_params(axis="x", nbins=5)
    every[0].set(yticks=range(len(shown)), yticklabels=list(shown), ylim=(len(shown) - 0.5, -0.5))
    figure.supxlabel("B − A (points)")
