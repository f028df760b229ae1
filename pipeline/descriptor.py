"""A file that stays open for reading at any place, by compiled code too, and is closed when nothing refers to it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ..files import open_regular_descriptor
from .rng import compiled

# The C library's own: read into memory of ours, a file that shrinks or a disk that fails is an error. Through a memory
# map it is a signal that ends the process.
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uint64, types.uint64, types.int64))


class Descriptor:
    """A regular file, or what a link leads to. Raises NotRegularFileError, OSError."""

    def __init__(self, path: Path) -> None:
        self.number = open_regular_descriptor(path)
        weakref.finalize(self, os.close, self.number).atexit = False
        self.bytes = os.fstat(self.number).st_size
        """When it was opened."""


@compiled
def read_at(file: int, at: int | np.int64, memory: NDArray[np.uint8]) -> bool:
    """Fill memory, uint8 [any] side by side, with the file's bytes from `at` on. Returns whether they all came."""
    done, refused = 0, 0
    while done < len(memory):
        rest = memory[done:]
        came = _pread(np.int32(file), np.uint64(rest.ctypes.data), np.uint64(len(rest)), np.int64(at + done))
        refused += came < 0
        if came == 0 or refused > 3:  # a signal may have come between, most of all on a network's disk
            return False
        done += max(came, 0)
    return True
