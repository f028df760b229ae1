"""Read a JPEG's size from its header, from compiled code, without the GIL.

Source: ITU-T T.81, annex B; markers are searched for as libjpeg does.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...storage.kernels import kernel

_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_RST0, _RST7 = 0xD0, 0xD7
_SOF0, _SOF15 = 0xC0, 0xCF
_DHT, _JPG, _DAC = 0xC4, 0xC8, 0xCC
"""In the range of frame markers, but not frames."""


@kernel()
def size_in_header(jpeg: NDArray[np.uint8]) -> tuple[int, int]:
    """Return height and width in pixels of a JPEG, uint8 [any]; (0, 0) without a readable frame header."""
    end = len(jpeg)
    if end < 4 or jpeg[0] != 0xFF or jpeg[1] != _SOI:
        return 0, 0
    at = 2
    while True:
        while at < end and jpeg[at] != 0xFF:
            at += 1
        while at < end and jpeg[at] == 0xFF:
            at += 1
        if at + 3 > end:
            return 0, 0
        marker = jpeg[at]
        at += 1
        if marker in (0, _TEM) or _RST0 <= marker <= _RST7:
            continue  # standalone markers
        if marker in (_SOI, _EOI, _SOS):
            return 0, 0
        if _SOF0 <= marker <= _SOF15 and marker not in (_DHT, _JPG, _DAC):
            return (_two_bytes(jpeg, at + 3), _two_bytes(jpeg, at + 5)) if at + 7 <= end else (0, 0)
        length = _two_bytes(jpeg, at)
        if length < 2:
            return 0, 0
        at += length


@kernel()
def _two_bytes(data: NDArray[np.uint8], at: int) -> Any:
    return np.int64(data[at]) << 8 | np.int64(data[at + 1])
