"""Tau at one snapshot against tau at a later one."""

from __future__ import annotations

from dataclasses import replace

from ...inspection.drift import Drift
from .plane import draw_plane, sample_colours
from .style import Style, drawing

TALLER = 1.6
"""A panel below the other needs as much height again to be read as a plane."""


def draw_drift(drift: Drift, style: Style) -> bytes:
    """How many samples had which tau at the earlier snapshot and which at the later one, as PNG.

    A panel for each side, on one scale of colours; what did not move lies on the dashed diagonal.
    """
    across = 1 if style.narrow else len(drift.sides)
    down = len(drift.sides) // across
    with drawing(replace(style, height=style.height * TALLER) if down > 1 else style) as (figure, png):
        panels = figure.subplots(down, across, squeeze=False).ravel()
        colours = sample_colours([side.joint for side in drift.sides])
        for axes, side in zip(panels, drift.sides, strict=True):
            mesh = draw_plane(axes, side.joint, colours, style)
            axes.set_title(side.name, loc="left")
        figure.supxlabel(f"tau at {drift.earlier.tag} (dimensionless)")
        figure.supylabel(f"tau at {drift.later.tag} (dimensionless)")
        bar = figure.colorbar(
            mesh, ax=panels.tolist(), label="samples (log scale)", format="{x:,.0f}", pad=0.02, aspect=20 * down
        )
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)
    return png.getvalue()
