"""Read files with untrusted names: missing files, folders, pipes, devices and huge files are refused."""

import os
import stat
from collections.abc import Callable

import numpy as np

from ..errors import BadSampleError

MAX_PICTURE_BYTES = 256 << 20
"""No photograph is larger; a worker would hold the file and its unpacked picture in memory."""
_ESTIMATED_FROM = 1000


def read_regular_file(path: bytes) -> bytes:
    """Return the bytes of a regular file; links are followed.

    Raises BadSampleError for anything else, for unreadable files, and above MAX_PICTURE_BYTES.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise BadSampleError("not a regular file")  # reading a pipe would block forever
        if found.st_size > MAX_PICTURE_BYTES:
            raise BadSampleError(f"{found.st_size:,} bytes, too large for a picture")
        with open(path, "rb", opener=_without_waiting) as file:
            return file.read(found.st_size)
    except OSError as error:
        raise BadSampleError(f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a name with a zero byte
        raise BadSampleError(f"not the name of a file: {error}") from error


def estimated_bytes(path_of: Callable[[int], bytes], files: int) -> int:
    """Estimate the total size from a thousand files: asking for all takes minutes on a network disk."""
    asked = np.unique(np.linspace(0, files - 1, min(files, _ESTIMATED_FROM)).astype(np.int64))
    return round(sum(_size(path_of(index)) for index in asked.tolist()) * files / len(asked))


def _size(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


def _without_waiting(path: str | bytes, flags: int) -> int:
    # If a pipe replaces the file meanwhile, opening it must not wait for a writer.
    return os.open(path, flags | os.O_NONBLOCK)
