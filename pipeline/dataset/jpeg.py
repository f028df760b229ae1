"""Decode a JPEG from compiled code, without the GIL.

FFCV's C decoder is loaded without importing ffcv, which takes seconds and 350 MB, and sets torch and numba to one
thread. Buffers are sized by the JPEG's own header, see `stored_sample.size_in_header`.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numba import types

from ...storage.arrays import Uint8s
from ...storage.kernels import kernel


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
    where = f" in {folders[0]}" if folders else ""
    raise ImportError(f"ffcv's library is missing{where}", name="ffcv")


_decode: Any = _imdecode()


@kernel()
def decode(jpeg: Uint8s, height: int, width: int, pixels: Uint8s, reduced: int) -> bool:
    """Decode a JPEG to RGB, with its sides divided by `reduced` and rounded up. Returns whether it is undamaged.

    jpeg: uint8 [bytes]. height, width: as `size_in_header` returns them. pixels: uint8 [3 × pixels, or more].
    reduced: 1, 2, 4 or 8. Orientation is as stored; the inverse DCT is the fast one.
    """
    rows, columns, zero, one = np.uint32(height), np.uint32(width), np.uint32(0), np.uint32(1)
    source, length, target = np.uint64(jpeg.ctypes.data), np.uint64(len(jpeg)), np.uint64(pixels.ctypes.data)
    result = _decode(
        source, length, rows, columns, target, rows, columns, zero, zero, one, np.uint32(reduced), False, False
    )
    return bool(result == 0)
