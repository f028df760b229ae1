"""The weights p* of samples' negatives by rank: how evenly a hot and a cold sample weigh theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .embedding_map import CLASS_COLOURS
from .svg import GREY, finish, is_narrow, legend, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
