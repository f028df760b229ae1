"""Read a JPEG's size and decode it, from compiled code and without the GIL.

FFCV's C decoder is loaded without importing ffcv, which takes seconds and 350 MB, and sets torch and numba to one
thread. Buffers are sized by the JPEG's own header. Source: ITU-T T.81, annex B; markers are searched for as libjpeg
does.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from .rng import compiled

_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_RST0, _RST7 = 0xD0, 0xD7
_SOF0, _SOF15 = 0xC0, 0xCF
_DHT, _JPG, _DAC = 0xC4, 0xC8, 0xCC
"""In the range of frame markers, but not frames."""


def _imdecode() -> Any:
    """Return FFCV's decoder by its name in the library: numba can cache calls to a name, but not to an address."""
    package = find_spec("ffcv")
    folders = (package and package.submodule_search_locations) or []
    for library in (file for folder in folders for file in Path(folder).glob("_libffcv*.so")):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        address, number, flag = types.uint64, types.uint32, types.boolean
        return types.ExternalFunction(
            "imdecode", types.int32(address, types.uint64, number, number, address, *[number] * 6, flag, flag)
        )
    raise ImportError(f"ffcv's library is missing in {folders}; install ffcv again")


_decode: Any = _imdecode()


@compiled
def decode(jpeg: NDArray[np.uint8], height: int, width: int, pixels: NDArray[np.uint8], reduced: int) -> bool:
    """Decode a JPEG to RGB, with its sides divided by `reduced` and rounded up. Returns whether it is undamaged.

    jpeg: uint8 [bytes]. height, width: as `size_in_header` returns them. pixels: uint8 [3 × pixels, or more].
    reduced: 1, 2, 4 or 8. Orientation is as stored; the inverse DCT is the fast one.
    """
    rows, columns, zero = np.uint32(height), np.uint32(width), np.uint32(0)
    result = _decode(
        np.uint64(jpeg.ctypes.data), np.uint64(len(jpeg)), rows, columns, np.uint64(pixels.ctypes.data), rows, columns,
        zero, zero, np.uint32(1), np.uint32(reduced), False, False,
    )  # fmt: skip
    return bool(result == 0)


@compiled
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
            continue  # these stand alone
        if marker in (_SOI, _EOI, _SOS):
            return 0, 0
        if _SOF0 <= marker <= _SOF15 and marker not in (_DHT, _JPG, _DAC):
            return (_two_bytes(jpeg, at + 3), _two_bytes(jpeg, at + 5)) if at + 7 <= end else (0, 0)
        length = _two_bytes(jpeg, at)
        if length < 2:
            return 0, 0
        at += length


@compiled
def _two_bytes(data: NDArray[np.uint8], at: int) -> Any:
    return np.int64(data[at]) << 8 | np.int64(data[at + 1])
