"""A file that grows while a run trains, and is read meanwhile: on a disk, the file itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar, Protocol

from .files import open_regular


class LogReader(Protocol):
    """What a log holds, readable from any place in it."""

    @property
    def size(self) -> int:
        """Its length in bytes."""

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start` on, fewer at the end."""


class Log(Protocol):
    """What the run's writer, and those who read, do with a log besides appending to its file on this machine."""

    is_late: ClassVar[bool]
    """Whether others see its lines only once they are put, at a checkpoint."""

    def begin(self, *, resuming: bool, exactly: bool = False) -> None:
        """Make the file what others see; one that goes on from there stays as it is, unless `exactly`.

        resuming: if not, it begins empty.
        """

    def settle(self) -> None:
        """Let others see no more than the file, which was cut since `begin`."""

    def put(self) -> None:
        """Show the lines added since the last time. Raises OSError; the next call then shows them."""

    def opened(self) -> AbstractContextManager[LogReader]:
        """Open what others see. Raises OSError."""

    def modified(self) -> float:
        """Return when something was added, in seconds since 1970. Raises FileNotFoundError if there is nothing yet."""


class FileLog:
    """A log on a disk, which others see as it is."""

    is_late: ClassVar[bool] = False

    def __init__(self, file: Path) -> None:
        self._file = file

    def begin(self, *, resuming: bool, exactly: bool = False) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""

    put = settle

    @contextmanager
    def opened(self) -> Iterator[LogReader]:
        with open_regular(self._file) as file:
            yield _OpenFile(file.fileno())

    def modified(self) -> float:
        return self._file.stat().st_mtime


class _OpenFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, start)
