"""A file that grows during training and is read meanwhile: on a disk, the file itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from .files import open_regular


class FileLog:
    """Operations of a run's writer and its readers on a log, besides appending to its file on this machine.

    On a disk, readers see the file itself.
    """

    is_late: ClassVar[bool] = False
    """Whether readers see lines only once they are put, at a checkpoint."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def begin(self, *, resuming: bool, exactly: bool = False) -> None:
        """Make the file match what readers see; a local continuation of it is kept, unless `exactly`.

        resuming: if False, the log starts empty.
        """

    def settle(self) -> None:
        """Show readers no more than the file, which was cut since `begin`."""

    def put(self) -> None:
        """Publish the lines added since the last call. Raises OSError; the next call then publishes them."""

    @contextmanager
    def opened(self) -> Iterator[FileReader]:
        """Open the published log. Raises OSError."""
        with open_regular(self._file) as file:
            yield FileReader(file.fileno())

    def modified(self) -> float:
        """Return the time of the last addition, in seconds since 1970. Raises FileNotFoundError if there is none."""
        return self._file.stat().st_mtime


class FileReader:
    """Random access to a log."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        """Length in bytes."""
        return os.fstat(self._descriptor).st_size

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`, fewer at the end."""
        return os.pread(self._descriptor, length, start)
