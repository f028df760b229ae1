"""Reading a file that somebody else named: it may be gone, a folder, a pipe, a device, or larger than memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import numpy as np

from ..errors import BadSampleError

MAX_PICTURE_BYTES = 256 << 20
"""A picture file above this is no photograph; a worker would hold it in memory, unpacked as well."""
_ESTIMATED_FROM = 1000


def read_regular_file(path: bytes) -> bytes:
    """The bytes of a regular file, or of what a chain of links leads to.

    Raises BadSampleError for anything else, for what cannot be read, and for more than MAX_PICTURE_BYTES.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise BadSampleError("not a regular file")  # reading a pipe would wait for ever
        if found.st_size > MAX_PICTURE_BYTES:
            raise BadSampleError(f"{found.st_size:,} bytes, too large for a picture")
        with open(path, "rb", opener=_without_waiting) as file:
            return file.read(found.st_size)
    except OSError as error:
        raise BadSampleError(f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a name with a zero byte
        raise BadSampleError(f"not the name of a file: {error}") from error


def estimated_bytes(path_of: Callable[[int], bytes], files: int) -> int:
    """The size of all files together, from a thousand of them: asking for every one takes minutes on a network."""
    asked = np.unique(np.linspace(0, files - 1, min(files, _ESTIMATED_FROM)).astype(np.int64))
    return round(sum(_size(path_of(index)) for index in asked.tolist()) * files / len(asked))


def _size(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


def _without_waiting(path: str | bytes, flags: int) -> int:
    # Should a pipe take the file's place meanwhile, opening it does not wait for a writer.
    return os.open(path, flags | os.O_NONBLOCK)
