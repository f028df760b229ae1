"""The report's figures, drawn with matplotlib: PNG bytes, in a light and a dark style, wide and narrow.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; sides differ in marker as well. No text that
comes from the data is drawn: matplotlib would read `$` as mathematics and lacks most scripts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .temperatures import Classes, Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 200
BINS = 60
MANY_CLASSES = 500
MARKERS = ("o", "D")


@dataclass(frozen=True)
class Style:
    """Size in inches, and colours."""

    width: float
    height: float
    paper: str
    ink: str
    grid: str
    sides: tuple[str, str]
    """First and second side."""

    @property
    def narrow(self) -> bool:
        return self.width < 5


LIGHT = Style(8.0, 3.6, paper="#ffffff", ink="#33373d", grid="#e3e5e8", sides=("#0072b2", "#d55e00"))
DARK = Style(8.0, 3.6, paper="#1b1e23", ink="#d3d7dd", grid="#343942", sides=("#56b4e9", "#e69f00"))


def narrow(style: Style) -> Style:
    """The same for a phone's screen."""
    return replace(style, width=3.7, height=3.5)


def draw_tau_by_class(sides: list[Side], classes: Classes, style: Style, note: str = "") -> bytes:
    """Mean tau of every class against its size, a dot for each class and side, as PNG; `note` stands below."""
    with _figure(style, note) as (figure, png):
        axes = figure.subplots()
        size = 9 if len(classes.names) > MANY_CLASSES else 26
        for side, colour, marker in zip(sides, style.sides, MARKERS, strict=False):
            axes.scatter(
                classes.sizes, classes.mean_tau[side.name],
                s=size, color=colour, marker=marker, alpha=0.75, linewidths=0, label=side.label, zorder=3,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlabel("class size (samples, log scale)")
        axes.set_ylabel("mean tau of the class (dimensionless)")
        _plain_size_ticks(axes, classes.sizes)
        _finish(axes, style)
        if len(sides) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, handletextpad=0.2, borderaxespad=0.2)
    return png.getvalue()


def draw_tau_histograms(
    sides: list[Side], visited: NDArray[np.bool_], tau_init: float | None, style: Style, note: str = ""
) -> bytes:
    """How many visited samples have which tau, a panel for each side on common axes, as PNG; `note` stands below."""
    lowest, highest = min(side.summary.min for side in sides), max(side.summary.max for side in sides)
    # A run whose every tau is the same still has a histogram: one bar of a visible width.
    edges = np.linspace(lowest, max(highest, lowest * 1.01), BINS + 1)
    with _figure(style, note) as (figure, png):
        across = 1 if style.narrow else len(sides)
        panels = figure.subplots(len(sides) // across, across, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, side, colour in zip(panels, sides, style.sides, strict=False):
            axes.hist(side.tau[visited], bins=edges, color=colour, zorder=3)
            axes.set_title(side.label, loc="left")
            if tau_init is not None:
                axes.axvline(tau_init, color=style.ink, linewidth=1, linestyle=(0, (3, 2)), zorder=4,
                             label=f"start, tau_init = {tau_init:g}")  # fmt: skip
            _finish(axes, style)
            axes.locator_params(axis="x", nbins=5)
            axes.yaxis.set_major_formatter("{x:,.0f}")
        panels[-1].legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
        figure.supxlabel("tau (dimensionless)")
        figure.supylabel("visited samples")
    return png.getvalue()


@contextmanager
def _figure(style: Style, note: str) -> Iterator[tuple[Figure, BytesIO]]:
    """A figure to draw in, and its PNG, there when the block ends. Needs no display; leaves matplotlib as it was."""
    import matplotlib
    from matplotlib.figure import Figure

    font = 9.0
    settings: dict[Any, Any] = {
        # Else the last tick of one panel touches the first of the next.
        "figure.constrained_layout.wspace": 0.06,
        "font.size": font, "axes.labelsize": font, "figure.labelsize": font, "axes.titlesize": font + 1,
        "axes.titleweight": "bold", "legend.fontsize": font, "legend.frameon": False,
        "text.color": style.ink, "axes.labelcolor": style.ink, "axes.edgecolor": style.ink,
        "xtick.color": style.ink, "ytick.color": style.ink, "axes.facecolor": style.paper, "grid.color": style.grid,
    }  # fmt: skip
    png = BytesIO()
    with matplotlib.rc_context(settings):
        figure = Figure((style.width, style.height), facecolor=style.paper, layout="constrained")
        yield figure, png
        if note:
            figure.text(0.995, -0.01, note, ha="right", va="top", fontsize=font - 1, alpha=0.8)
        figure.savefig(png, format="png", dpi=PIXELS_PER_INCH, bbox_inches="tight", pad_inches=0.12)


def _finish(axes: Axes, style: Style) -> None:
    axes.grid(axis="y", linewidth=0.8, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(style.grid)
    axes.tick_params(length=0)


def _plain_size_ticks(axes: Axes, sizes: NDArray[np.int64]) -> None:
    """Ticks at 1, 2, 5, 10, …, written as counts, not as powers of ten; sparser where sizes span many decades."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    decades = np.log10(sizes.max() / sizes.min())
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades <= 3 else (1,), numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
