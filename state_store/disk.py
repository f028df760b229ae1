"""Flushing whole file systems to disk."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..files import sync

__all__ = ["sync", "sync_file_system", "written_through"]

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def written_through(directory: Path) -> Iterator[None]:
    """Flush everything that the block wrote to the file system of `directory`, once the block succeeds.

    One syncfs call covers files, names and directories. It is far faster than an fsync for each of a thousand chunks,
    but also waits for what other programs wrote. Raises OSError if writing failed, for example on a full disk.
    """
    # Open first: a write-back error that occurs before a descriptor is opened is not reported to that descriptor.
    opened = os.open(directory, os.O_RDONLY)
    try:
        yield
        sync_file_system(opened)
    finally:
        os.close(opened)


def sync_file_system(opened: int) -> None:
    """Flush the file system of an open file. Raises OSError."""
    if _libc.syncfs(opened) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
