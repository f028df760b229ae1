"""Tau at one snapshot against tau at a later one."""

from __future__ import annotations

from dataclasses import replace

from ...inspection.drift import Drift
from .plane import draw_plane, sample_colours
from .style import Style, drawing

TALLER = 1.6
"""Stacked panels need more height to be readable."""


def draw_drift(drift: Drift, style: Style) -> bytes:
    """Draw the joint histogram of tau at the earlier and the later snapshot as PNG.

    One panel per side, on one colour scale; samples that did not move lie on the dashed diagonal.
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
