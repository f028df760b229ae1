"""Shared by all figures: sizes, colours and PNG encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from .lettering import letter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 200
COLOURS = 256
MARKERS = ("o", "D")
"""Markers of the first and the second side."""
COLOUR_MAP = "cividis"
MARGIN = 0.08
"""Inches around and between panels."""


@dataclass(frozen=True)
class Style:
    """Size in inches, and colours."""

    width: float
    height: float
    paper: str
    ink: str
    grid: str
    sides: tuple[str, str]
    """Colours of the first and second side."""

    @property
    def narrow(self) -> bool:
        return self.width < 5


LIGHT = Style(8.0, 3.6, paper="#ffffff", ink="#33373d", grid="#e3e5e8", sides=("#0072b2", "#d55e00"))
DARK = Style(8.0, 3.6, paper="#1b1e23", ink="#d3d7dd", grid="#343942", sides=("#56b4e9", "#e69f00"))


Draw = Callable[["Figure", Style], None]
"""Draws on an empty figure of the style's size, which it may change."""


def narrow(style: Style) -> Style:
    """Return the style sized for a phone screen."""
    return replace(style, width=3.7, height=3.5)


def panels(figure: Figure, count: int, style: Style, *, shared: bool = False) -> list[Axes]:
    """Return axes side by side, or one below the other in a narrow figure; shared: with common scales."""
    grid = (count, 1) if style.narrow else (1, count)
    axes: list[Axes] = figure.subplots(*grid, sharex=shared, sharey=shared, squeeze=False).ravel().tolist()
    return axes


def legend(axes: Axes, *, right: bool = False, **settings: Any) -> None:
    """Put the legend above the axes, at the left or at the right end."""
    place: dict[str, Any] = {"loc": "lower right" if right else "lower left", "bbox_to_anchor": (int(right), 1)}
    axes.legend(**place, borderaxespad=0.2, **settings)


def png_of(draw: Draw, style: Style, note: str = "") -> bytes:
    """Return a figure as PNG; `note` goes below it. Needs no display and leaves matplotlib's settings unchanged."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    font = 9.0
    settings: dict[Any, Any] = {
        # Otherwise the last tick of one panel touches the first of the next.
        "figure.constrained_layout.wspace": 0.06,
        "figure.constrained_layout.w_pad": MARGIN,
        "figure.constrained_layout.h_pad": MARGIN,
        "font.size": font,
        "axes.labelsize": font,
        "figure.labelsize": font,
        "axes.titlesize": font + 1,
        "axes.titleweight": "bold",
        "legend.fontsize": font,
        "legend.frameon": False,
        "text.color": style.ink,
        "axes.labelcolor": style.ink,
        "axes.edgecolor": style.ink,
        "xtick.color": style.ink,
        "ytick.color": style.ink,
        "axes.facecolor": style.paper,
        "grid.color": style.grid,
    }
    with matplotlib.rc_context(settings):
        figure = Figure((style.width, style.height), PIXELS_PER_INCH, facecolor=style.paper, layout="constrained")
        draw(figure, style)
        if note:
            _write_below(figure, note, font - 1)
        letter(figure)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # type: ignore[no-untyped-call]
        pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    drawn = Image.fromarray(pixels).convert("RGB")
    # A palette takes a third of the bytes without visible loss; the page holds every figure four times.
    small = drawn.quantize(COLOURS, Image.Quantize.FASTOCTREE)
    _set_paper(small, tuple(pixels[0, 0, :3].tolist()))
    png = BytesIO()
    small.save(png, "PNG")
    return png.getvalue()


def _set_paper(picture: Image.Image, paper: tuple[int, ...]) -> None:
    """Set the exact colour of the first pixel, so that the paper matches the page."""
    place, palette = int(np.asarray(picture)[0, 0]), picture.getpalette() or []
    palette[3 * place : 3 * place + 3] = paper
    picture.putpalette(palette)


def _write_below(figure: Figure, note: str, size: float) -> None:
    height = size / 72 / figure.get_figheight() * 1.6
    figure.set_layout_engine("constrained", rect=(0, height, 1, 1 - height))
    figure.text(0.99, height / 4, note, ha="right", va="bottom", fontsize=size, alpha=0.8)


def finish(axes: Axes, style: Style) -> None:
    axes.grid(axis="y", linewidth=0.8, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(style.grid)
    axes.tick_params(length=0)
