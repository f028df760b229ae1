"""Copies of pictures as people make them: encoded again, or a part enlarged to the whole."""

from io import BytesIO

from PIL import Image


def encoded(picture, quality):
    file = BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return Image.open(file)


def magnified(picture, by, shift=(0.0, 0.0)):
    """The part of the picture that, enlarged by this factor, fills it; shift: of that part, in pixels."""
    margin = [(1 - 1 / by) * side / 2 for side in picture.size]
    (left, top), (dx, dy) = margin, shift
    box = (left + dx, top + dy, picture.width - left + dx, picture.height - top + dy)
    return picture.resize(picture.size, Image.Resampling.BICUBIC, box)
