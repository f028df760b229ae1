"""Files of pictures that Pillow alone does not write, and copies as people make them."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

from thermopile.pipeline.dataset.index import ImagePolicy

POLICY = ImagePolicy(max_size=64, quality=90)


def as_bytes(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, rows, *, depth=8, colour=2, extra=b""):
    """A PNG from its raw rows; Pillow writes neither every depth nor every chunk."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def encoded(picture, quality):
    return Image.open(io.BytesIO(as_bytes(picture, "JPEG", quality=quality)))


def magnified(picture, by, shift=(0.0, 0.0)):
    """The part of the picture that, enlarged by this factor, fills it; shift: of that part, in pixels."""
    margin = [(1 - 1 / by) * side / 2 for side in picture.size]
    (left, top), (dx, dy) = margin, shift
    box = (left + dx, top + dy, picture.width - left + dx, picture.height - top + dy)
    return picture.resize(picture.size, Image.Resampling.BICUBIC, box)


def draw(seed: int, height: int = 24, width: int = 32) -> Image.Image:
    """A picture that no other seed gives: smooth, so that JPEG keeps it."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
