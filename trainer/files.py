"""Files that are whole or absent, also after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path`, flush to disk, then take its place."""
    with written_aside(path) as file:
        file.write(data)


@contextmanager
def written_aside(to: Path) -> Iterator[BinaryIO]:
    """A file beside `to` that takes its place at the end, on the disk; removed where anything fails."""
    # With the process's number: two that write to one name must not write into one file.
    beside = to.with_name(f".{to.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(to)
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(to.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: a rename is not, until its directory is flushed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
