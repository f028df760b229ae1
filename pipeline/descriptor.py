"""A file open for random reads, also by compiled code; it closes when nothing refers to it."""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ..files import open_regular_descriptor
from .rng import compiled

# The C library's pread: if the file shrinks or the disk fails, it returns an error. Through a memory map that would be
# a signal that kills the process.
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uint64, types.uint64, types.int64))


class Descriptor:
    """A regular file, or the target of a link. Raises NotRegularFileError, OSError."""

    def __init__(self, path: Path) -> None:
        self.number = open_regular_descriptor(path)
        weakref.finalize(self, os.close, self.number).atexit = False
        self.bytes = os.fstat(self.number).st_size
        """Size when it was opened."""


@compiled
def read_at(file: int, at: int | np.int64, memory: NDArray[np.uint8]) -> bool:
    """Fill memory, uint8 [any], contiguous, with the file's bytes from `at`. Returns whether all were read."""
    done, refused = 0, 0
    while done < len(memory):
        rest = memory[done:]
        came = _pread(np.int32(file), np.uint64(rest.ctypes.data), np.uint64(len(rest)), np.int64(at + done))
        refused += came < 0
        if came == 0 or refused > 3:  # a signal may interrupt a read, above all on a network disk
            return False
        done += max(came, 0)
    return True
