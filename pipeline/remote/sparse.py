"""Sparse files, which hold only parts: the rest takes no disk space and reads as zeros."""

from __future__ import annotations

import ctypes
import errno
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...storage.files import open_own

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def create(path: Path, size: int) -> None:
    """Create an empty sparse file of that size, unless it exists."""
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def write(path: Path, starts: NDArray[np.int64], stops: NDArray[np.int64], data: bytes) -> None:
    """Write parts of the file, ascending, int64 [k] each; data begins with the first and has the gaps between them.

    Raises OSError, naming the cache's folder, if there is no space.
    """
    descriptor, first, view = open_own(path, os.O_WRONLY), int(starts[0]), memoryview(data)
    runs = pairwise([0, *(np.flatnonzero(starts[1:] > stops[:-1]) + 1).tolist(), len(starts)])
    try:
        for low, high in runs:
            at, stop = int(starts[low]), int(stops[high - 1])
            while at < stop:
                at += os.pwrite(descriptor, view[at - first : stop - first], at)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} cannot be written: {error.strerror}. Set THERMOPILE_CACHE to a folder on a "
            "larger disk, or a smaller data.cache",
        ) from None
    finally:
        os.close(descriptor)


def refuse_if_whole(folder: Path) -> None:
    """Raise OSError if parts of files in this folder cannot be freed."""
    probe = folder / "probe"
    create(probe, 8192)
    try:
        drop(probe, 4096, 8192)
    finally:
        probe.unlink()


def drop(path: Path, start: int, stop: int) -> None:
    """Free a part of the file, whole pages of the file system. Raises OSError if the file system cannot."""
    if start >= stop:
        return
    descriptor = open_own(path, os.O_WRONLY)
    try:
        where = ctypes.c_int64(start), ctypes.c_int64(stop - start)
        if _libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, *where) != 0:
            error = ctypes.get_errno()
            if error == errno.EOPNOTSUPP:
                raise OSError(
                    error,
                    f"the file system of {path.parent} cannot free parts of files; set "
                    "THERMOPILE_CACHE to a folder on a local disk",
                )
            raise OSError(error, os.strerror(error), str(path))
    finally:
        os.close(descriptor)
