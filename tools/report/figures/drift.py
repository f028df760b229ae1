"""Tau at one snapshot against tau at a later one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...inspection.drift import Drift
from .style import COLOUR_MAP, DARK, Style, drawing, finish

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

TALLER = 1.6
"""A panel below the other needs as much height again to be read as a plane."""


def draw_drift(drift: Drift, style: Style, note: str = "") -> bytes:
    """How many samples had which tau at the earlier snapshot and which at the later one, as PNG; `note` stands below.

    A panel for each side, on one scale of colours; what did not move lies on the dashed diagonal.
    """
    from matplotlib.colors import LogNorm

    across = 1 if style.narrow else len(drift.sides)
    down = len(drift.sides) // across
    with drawing(replace(style, height=style.height * TALLER) if down > 1 else style, note) as (figure, png):
        panels = figure.subplots(down, across, squeeze=False).ravel()
        # At least 1 to 10, so that the scale has two ends where no bin holds more than one sample.
        colours = LogNorm(1, max(10, *(int(side.joint.counts.max()) for side in drift.sides)))
        for axes, side in zip(panels, drift.sides, strict=True):
            counts = np.ma.masked_equal(side.joint.counts, 0)
            before, after = side.joint.edges
            mesh = axes.pcolormesh(before, after, counts.T, norm=colours, cmap=_colour_map(style), zorder=2)
            axes.axline((before[0], before[0]), slope=1, color=style.ink, linewidth=1, linestyle=(0, (3, 2)), zorder=3)
            axes.set(xlim=before[[0, -1]], ylim=after[[0, -1]])
            axes.set_title(side.label, loc="left")
            finish(axes, style)
            axes.locator_params(nbins=5)
        figure.supxlabel(f"tau at {drift.earlier.tag} (dimensionless)")
        figure.supylabel(f"tau at {drift.later.tag} (dimensionless)")
        bar = figure.colorbar(mesh, ax=panels.tolist(), label="samples", format="{x:,.0f}", pad=0.02, aspect=20 * down)
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)
    return png.getvalue()


def _colour_map(style: Style) -> Colormap:
    """On dark paper without the map's darkest part: nobody would see the bins of one sample."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    darkest = 0.3 if style.paper == DARK.paper else 0.0
    return ListedColormap(colormaps[COLOUR_MAP](np.linspace(darkest, 1, 256)))
