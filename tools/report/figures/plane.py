"""Joint histogram of two temperatures per sample, on a log colour scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...inspection.joint import Joint
from .style import COLOUR_MAP, DARK, Style, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import Colormap, LogNorm


def draw_plane(axes: Axes, joint: Joint, colours: LogNorm, style: Style) -> QuadMesh:
    """Draw the first value on x, the second on y; on the dashed diagonal both are equal."""
    across, up = joint.edges
    counts = np.ma.masked_equal(joint.counts.T, 0)
    mesh = axes.pcolormesh(across, up, counts, norm=colours, cmap=_colour_map(style), zorder=2)
    axes.axline((across[0], across[0]), slope=1, color=style.ink, linewidth=1, linestyle=(0, (3, 2)), zorder=3)
    axes.set(xlim=across[[0, -1]], ylim=up[[0, -1]])
    finish(axes, style)
    axes.locator_params(nbins=5)
    return mesh


def sample_colours(joints: list[Joint]) -> LogNorm:
    """Return one colour scale for all; at least 1 to 10, so that it has two ends even if no bin exceeds one sample."""
    from matplotlib.colors import LogNorm

    return LogNorm(1, max(10, *(int(joint.counts.max()) for joint in joints)))


def _colour_map(style: Style) -> Colormap:
    """Return the colour map; on dark paper without its darkest part, which would hide bins of one sample."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    darkest = 0.3 if style.paper == DARK.paper else 0.0
    return ListedColormap(colormaps[COLOUR_MAP](np.linspace(darkest, 1, 256)))
