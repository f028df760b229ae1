"""The page's picture: every method's accuracy by band of class frequency, as PNG bytes.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; the bars are also written out in the tables.
"""

from __future__ import annotations

from io import BytesIO
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reproduction.plan import MODES, Mode
from reproduction.results import BANDS, KNN, LINEAR, RETRIEVAL, Measure, Results

BASELINE, INDIVIDUAL, THIRD, FOURTH = "#0072b2", "#009e73", "#e69f00", "#cc79a7"
COLOURS = {
    "clip": BASELINE, "simclr": BASELINE, "isogclr": INDIVIDUAL, "sogclr": THIRD, "decl": THIRD,
    "fastclip_v3": FOURTH, "auc_cl": FOURTH,
}  # fmt: skip
INK, GRID = "#33373d", "#e3e5e8"
PANELS: tuple[tuple[Mode, Measure], ...] = (
    ("bimodal", LINEAR), ("bimodal", RETRIEVAL), ("unimodal", LINEAR), ("unimodal", KNN),
)  # fmt: skip


def draw_bands(results: Results, batch_size: int) -> bytes:
    """Grouped bars, a panel for each mode and measure; a whisker is the range over seeds where there are several."""
    settings: dict[Any, Any] = {
        "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "text.color": INK, "axes.labelcolor": INK,
        "xtick.color": INK, "ytick.color": INK, "legend.frameon": False,
    }  # fmt: skip
    png = BytesIO()
    with matplotlib.rc_context(settings):
        figure = Figure((9.0, 5.6), facecolor="#ffffff", layout="constrained")
        panels = figure.subplots(2, 2, sharey=True)
        for axes, (mode, measure) in zip(panels.ravel(), PANELS, strict=True):
            _draw_panel(axes, results, mode, measure, batch_size)
        for row, mode in zip(panels, MODES, strict=True):
            row[0].set_ylabel("right, %")
            row[1].legend(loc="upper left", bbox_to_anchor=(1, 1), title=mode, alignment="left")
        figure.savefig(png, format="png", dpi=160)
    return png.getvalue()


def _draw_panel(axes: Axes, results: Results, mode: Mode, measure: Measure, batch_size: int) -> None:
    methods = results.methods(mode)
    width = 0.8 / max(len(methods), 1)
    for place, method in enumerate(methods):
        for band, name in enumerate(BANDS):
            if not (shares := [100 * share for share in results.shares(mode, method, batch_size, measure, name)]):
                continue
            x, mean = band - 0.4 + (place + 0.5) * width, fmean(shares)
            axes.bar(x, mean, 0.9 * width, color=COLOURS[method], label=method if band == 0 else None, zorder=3)
            if len(shares) > 1:
                axes.errorbar(x, mean, [[mean - min(shares)], [max(shares) - mean]], color=INK, linewidth=1, zorder=4)
    axes.set_title(f"{mode}: {measure.label}", loc="left")
    axes.set_xticks(range(len(BANDS)), BANDS)
    axes.set_ylim(0, 100)
    axes.grid(axis="y", linewidth=0.8, color=GRID, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(length=0)
