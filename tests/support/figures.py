"""Figures as pixels."""

from functools import partial
from io import BytesIO

import numpy as np
from PIL import Image, ImageColor

from thermopile.tools.report.figures.style import png_of


def drawn(draw, *data_and_style):
    """The PNG that a function draws."""
    *data, style = data_and_style
    return png_of(partial(draw, *data), style)


def pixels(png):
    with Image.open(BytesIO(png)) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def is_of(png, colour):
    """bool [H, W]: where a figure has this colour, or nearly: its file holds 256 colours."""
    return np.abs(pixels(png) - ImageColor.getrgb(colour)).max(2) < 12
