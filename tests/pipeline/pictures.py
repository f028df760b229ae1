"""Files of pictures, for the tests of what conversion makes of them."""

import io
import struct
import zlib

from thermopile.pipeline.dataset_index import ImagePolicy

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
