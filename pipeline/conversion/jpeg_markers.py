"""Read from a JPEG's markers what Pillow does not tell: its coding and its number of scans.

Source: ITU-T T.81, annex B.
"""

import re
from typing import NamedTuple

from ..errors import BadSampleError

MAX_SCANS = 100
"""JPEGs have about ten; each costs a pass over all pixels, but only a hundred bytes of the file."""
MAX_SEGMENTS = 10_000
"""Segments hold up to 64 KB each: far more than fits a page of the dataset's file."""
MAX_FILL = 1_000
"""Limit of meaningless bytes between two segments; there should be none, and Pillow scans each."""

_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_APP0, _APP1, _APP15 = 0xE0, 0xE1, 0xEF
_JFIF_BYTES = 16
"""Length of the first segment of nearly every JPEG, if it has no thumbnail."""
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ONE_PASS_FRAMES = (0xC0, 0xC1)
_HUFFMAN_FRAMES = (0xC0, 0xC1, 0xC2)
"""Baseline, extended and progressive."""
# Excludes stuffed zeros and restarts, which occur in coded data, and fill bytes.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")


class Coding(NamedTuple):
    """How the first picture in a JPEG file is coded."""

    is_huffman: bool
    """Baseline or progressive, which every decoder supports; not arithmetic or lossless, which hardware lacks."""
    scans: int
    """Number of passes over the whole picture."""
    plain_size: tuple[int, int] | None = None
    """Height and width of a baseline JPEG of 8-bit YCbCr in one scan with a minimal header: no EXIF, no Adobe or other
    application marker, and no bytes between segments, on which decoders disagree."""


def coding_of(jpeg: bytes) -> Coding:
    """Walk the markers: to the first scan if the header shows that it is the only one, else to the end.

    Raises BadSampleError for decoder bombs: too many scans, segments or fill bytes.
    """
    frame, scans, place, header, is_plain = 0, 0, 0, b"", True
    for _ in range(MAX_SEGMENTS):
        found = _MARKER.search(jpeg, place)
        if not found or found.end() + 8 > len(jpeg) or (marker := jpeg[found.end() - 1]) == _EOI:
            return Coding(frame in _HUFFMAN_FRAMES, scans)
        if not scans and found.start() - place > MAX_FILL:
            raise BadSampleError(f"a bomb: more than {MAX_FILL:,} bytes between two parts of its header")
        is_plain &= found.start() == place and not _APP1 <= marker <= _APP15
        place = found.end()
        if marker == _SOI:
            continue
        if marker in _FRAMES:
            frame, header = marker, jpeg[place + 2 : place + 17]
        length = int.from_bytes(jpeg[place : place + 2], "big")
        is_plain &= marker != _APP0 or length == _JFIF_BYTES
        if marker == _SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise BadSampleError(f"a bomb: more than {MAX_SCANS} scans")
            if frame in _ONE_PASS_FRAMES and jpeg[place + 2] == header[5]:
                # The coded data follows, which is slow to search.
                return Coding(is_huffman=True, scans=1, plain_size=_size_of_ycbcr(header) if is_plain else None)
        place += length
    raise BadSampleError(f"a bomb: more than {MAX_SEGMENTS:,} segments")


def _size_of_ycbcr(header: bytes) -> tuple[int, int] | None:
    """Return height and width from a frame header with three 8-bit components not named R, G and B; else None."""
    precision, components, names = header[0], header[5], header[6::3]
    if precision != 8 or components != 3 or names == b"RGB":
        return None
    return int.from_bytes(header[1:3], "big"), int.from_bytes(header[3:5], "big")
