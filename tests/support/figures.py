"""Figures as pixels, in the colours of light paper, and as a browser gets them."""

from functools import partial
from xml.etree import ElementTree

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import ImageColor

from thermopile.tools.report.figures.svg import RASTER_DPI, WIDE, svg_of

SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"


def pixels(draw, *data, size=WIDE):
    """What a function draws, int [H, W, 3]."""
    canvas = FigureCanvasAgg(Figure(size, RASTER_DPI, layout="constrained"))
    draw(*data, canvas.figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].astype(int)


def is_of(image, colour):
    """bool [H, W]: where a figure has this colour, or nearly."""
    return np.abs(image - ImageColor.getrgb(colour)).max(2) < 12


def svg(draw, *data, size=WIDE):
    """The figure as an element of a page."""
    return ElementTree.fromstring(svg_of(partial(draw, *data), size))


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]
