"""A file of a source, local or in an object store, for reading at any place."""

import io
import os
from typing import Any

from ...files import open_regular_descriptor
from ...objects import Address, Place
from ..errors import SourceError

PIECE_BYTES = 256 << 10
"""Least that is asked of an object store at once; the next members of an archive are mostly wanted next."""
MAX_PIECE_BYTES = 8 << 20
"""Most that is read ahead where one piece follows the other."""


class SourceFile:
    """Opened at construction, and again at the first use in another process.

    Raises OSError, also FileNotFoundError and NotRegularFileError; SourceError once the file has changed.
    """

    _descriptor: int | None
    _is_checked: bool
    """Whether a remote file was found unchanged in this process; a local one is looked at each time."""

    def __init__(self, place: Place) -> None:
        self._reset(place)
        self.version = self._version()
        """Size in bytes, and time of the last change or the object's entity tag."""

    @property
    def size(self) -> int:
        return self.version[0]

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes from `at` on; fewer where the file ends."""
        if not (self._is_checked and isinstance(self.place, Address)):
            if self._version() != self.version:
                raise SourceError(f"{self.place} was changed while it was converted; convert it again")
            self._is_checked = True
        if self._descriptor is not None:
            try:
                return os.pread(self._descriptor, count, at)
            except OSError as error:
                error.filename = str(self.place)
                raise
        return self._read_object(at, min(count, self.size - at)) if at < self.size else b""

    def reader(self) -> io.BufferedReader:
        """Return a buffered, seekable reader for libraries that take files."""
        return io.BufferedReader(_Reader(self), PIECE_BYTES)

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place, "version": self.version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset(state["place"])
        self.version = state["version"]

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)

    def _reset(self, place: Place) -> None:
        self.place, self._is_checked = place, False
        self._descriptor = None
        self._held_at, self._held, self._piece_bytes = 0, b"", PIECE_BYTES

    def _version(self) -> tuple[int, int | str]:
        if isinstance(self.place, Address):
            return self.place.version()
        if self._descriptor is None:
            self._descriptor = open_regular_descriptor(self.place)
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _read_object(self, at: int, count: int) -> bytes:
        end = self._held_at + len(self._held)
        if not (self._held_at <= at and at + count <= end):
            goes_on = 0 <= at - end < self._piece_bytes
            self._piece_bytes = min(2 * self._piece_bytes, MAX_PIECE_BYTES) if goes_on else PIECE_BYTES
            assert isinstance(self.place, Address)
            self._held = self.place.read_range(at, min(max(count, self._piece_bytes), self.size - at))
            self._held_at = at
        return self._held[at - self._held_at :][:count]


class _Reader(io.RawIOBase):
    def __init__(self, file: SourceFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, memory: Any) -> int:
        data = self._file.read(self._at, min(len(memory), MAX_PIECE_BYTES))
        memory[: len(data)] = data
        self._at += len(data)
        return len(data)
