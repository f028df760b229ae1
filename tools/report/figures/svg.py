"""Figures as SVG: matplotlib draws and measures, the browser has the fonts, the page's CSS has the colours."""

from __future__ import annotations

import base64
import hashlib
import re
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from PIL import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = (8.0, 3.6), (3.7, 3.5)
"""Inches, for a laptop's screen and for a phone's."""
PAPER, INK, GRID = "#ffffff", "#33373d", "#e3e5e8"
SIDES = ("#0072b1", "#d55e01")
"""Colours of the first and second side: Okabe and Ito's blue and vermilion, one level off, so that the classes of the
map, which have these in every theme, are no side."""
GREY = "#8a8f96"
"""Shows on light and on dark paper."""
VARIABLES = dict(zip((PAPER, INK, GRID, *SIDES), ("paper", "ink", "line", "side-1", "side-2"), strict=True))
"""Colour -> the page's custom property in its place."""
MARKERS = ("o", "D")
"""Markers of the first and the second side."""
COLOUR_MAP = "cividis"
MARGIN = 0.08
"""Inches around and between panels."""
RASTER_DPI, LARGE_RASTER = 200, 30_000
"""Dots per inch, and bytes."""
CSS_PIXELS_PER_INCH = 120
"""For a figure on a page: its text then matches the page's small print."""
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_FONT = 9.0
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "the same figure has the same ids",
    # Otherwise the last tick of one panel touches the first of the next.
    "figure.constrained_layout.wspace": 0.06,
    "figure.constrained_layout.w_pad": MARGIN,
    "figure.constrained_layout.h_pad": MARGIN,
    "font.size": _FONT,
    "axes.labelsize": _FONT,
    "figure.labelsize": _FONT,
    "axes.titlesize": _FONT + 1,
    "axes.titleweight": "bold",
    "legend.fontsize": _FONT,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "grid.color": GRID,
}

Draw = Callable[["Figure"], None]
"""Draws on an empty figure as wide as WIDE or NARROW, whose height it may change."""


def svg_of(draw: Draw, size: tuple[float, float] = WIDE) -> str:
    """Return a figure as SVG, for a page whose CSS has VARIABLES and the font. Leaves matplotlib as it is set."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = BytesIO()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # DejaVu, by which texts are measured, is wider than most fonts but lacks many scripts, which browsers have.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure = Figure(size, RASTER_DPI, facecolor=PAPER, layout="constrained")
        draw(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawn, format="svg", dpi=RASTER_DPI, metadata=nothing)
    root = ElementTree.fromstring(drawn.getvalue())
    root.set("class", "narrow" if size == NARROW else "wide")
    root.set("width", f"{figure.get_figwidth() * CSS_PIXELS_PER_INCH:.0f}")
    del root.attrib["height"]  # CSS keeps the proportions
    used = {*re.findall(r"#([\w.]+)", drawn.getvalue().decode())}
    _clean(root, used, hashlib.sha256(drawn.getvalue()).hexdigest()[:6])
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, "unicode")


def _clean(root: ElementTree.Element, used: set[str], prefix: str) -> None:
    """Leave out what a page does not need, prefix the ids in use, and replace colours by variables."""
    for element in root.iter():
        for style in element.findall(f"{{{_SVG}}}style"):
            element.remove(style)  # would hold for the whole page; report.css has it
        if element.text and element.text.isspace():
            element.text = None
        element.tail = None
        for name, value in list(element.items()):
            if name == "style":
                value = re.sub(r"font-family: [^;]*;? ?", "", value)
                for colour, variable in VARIABLES.items():
                    value = value.replace(colour, f"var(--{variable})")
                element.set(name, value)
            elif name == f"{{{_XLINK}}}href":
                element.set(name, f"#{prefix}{value[1:]}" if value.startswith("#") else _smaller(value))
            elif name == "clip-path":
                element.set(name, value.replace("#", f"#{prefix}"))
            elif name == "id" and value in used:
                element.set(name, prefix + value)
            elif name == "id" or value.startswith("rotate(-0 "):
                del element.attrib[name]  # nothing refers to it, or it does not turn
            elif name in ("d", "x", "y"):
                shorter = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), value)
                element.set(name, " ".join(shorter.split()))


def _smaller(png: str) -> str:
    """Give a large raster a palette: a third of the bytes without visible loss. A scale keeps all its colours."""
    if len(png) < LARGE_RASTER:
        return png
    shown, small = Image.open(BytesIO(base64.b64decode(png.partition(",")[2]))), BytesIO()
    shown.convert("RGBA").quantize(256, Image.Quantize.FASTOCTREE).save(small, "PNG")
    return f"data:image/png;base64,{base64.b64encode(small.getvalue()).decode('ascii')}"


def is_narrow(figure: Figure) -> bool:
    return bool(figure.get_figwidth() < WIDE[0] / 2)


def panels(figure: Figure, count: int, *, shared: bool = False) -> list[Axes]:
    """Return axes side by side, or one below the other in a narrow figure; shared: with common scales."""
    grid = (count, 1) if is_narrow(figure) else (1, count)
    axes: list[Axes] = figure.subplots(*grid, sharex=shared, sharey=shared, squeeze=False).ravel().tolist()
    return axes


def legend(axes: Axes, *, right: bool = False, **settings: Any) -> None:
    """Put the legend above the axes, at the left or at the right end."""
    place: dict[str, Any] = {"loc": "lower right" if right else "lower left", "bbox_to_anchor": (int(right), 1)}
    axes.legend(**place, borderaxespad=0.2, **settings)


def finish(axes: Axes) -> None:
    axes.grid(axis="y", linewidth=0.8, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(length=0)
