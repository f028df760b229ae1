"""A file of a source, local or in an object store, for random access or to be read once."""

from __future__ import annotations

import io
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

from ...storage.bucket import Address
from ...storage.files import RegularFile
from ...storage.local import LocalPath
from ...storage.place import Place, made_for
from ..errors import SourceChangedError

PIECE_BYTES = 256 << 10
"""Minimum request to an object store: the next members of an archive are mostly wanted next."""
MAX_PIECE_BYTES = 8 << 20
"""Maximum read-ahead in sequential reading."""
AHEAD_BYTES, PIECES_AHEAD = 8 << 20, 3
"""Size of the pieces of a file that is read once, and how many of them are requested at a time."""
Version = tuple[int, int | str]
"""Size in bytes, and time of the last change in nanoseconds or the object's entity tag."""


class SourceFile:
    """Opened at construction, and again on first use in another process.

    version: an earlier listing's; None for the present version. Raises OSError, also FileNotFoundError and
    NotRegularFileError; SourceChangedError once the version differs.
    """

    def __init__(self, place: Place, version: Version | None = None) -> None:
        self.place = place
        self.version = version or self._opened.version()

    @property
    def size(self) -> int:
        return self.version[0]

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes from `at`; fewer at the end of the file."""
        return self._opened.read(at, count, self.version)

    def read_piece(self, at: int, count: int) -> bytes:
        """Return `count` bytes from `at`, in one request; thread-safe."""
        return self._opened.piece(at, count, self.version)

    def reader(self) -> io.BufferedReader:
        """Return a buffered, seekable reader for libraries that take files."""
        return io.BufferedReader(_Reader(self), PIECE_BYTES)

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place, "version": self.version}

    @cached_property
    def _opened(self) -> _LocalFile | _Object:
        return made_for(self.place, _LocalFile, _Object)


class _LocalFile:
    def __init__(self, path: LocalPath) -> None:
        self._path, self._file = path, RegularFile(path)

    def version(self) -> Version:
        found = os.fstat(self._file.number)
        return found.st_size, found.st_mtime_ns

    def read(self, at: int, count: int, version: Version) -> bytes:
        data, count = b"", min(count, version[0] - at)
        try:
            while len(data) < count and (more := self._file.read(at + len(data), count - len(data))):
                data += more  # a network disk may return less than there is
        except OSError as error:
            error.filename = str(self._path)
            raise
        if self.version() != version:  # checked afterwards, since the file may change during the read
            raise SourceChangedError(self._path)
        return data

    piece = read


class _Object:
    """Holds the last piece read, and reads ahead in sequential reading."""

    def __init__(self, object: Address) -> None:
        self._object = object
        self._held_at, self._held, self._piece_bytes = 0, b"", PIECE_BYTES

    def version(self) -> Version:
        return self._object.version()

    def read(self, at: int, count: int, version: Version) -> bytes:
        size, _ = version
        if at >= size:
            return b""
        count, end = min(count, size - at), self._held_at + len(self._held)
        if not (self._held_at <= at and at + count <= end):
            goes_on = 0 <= at - end < self._piece_bytes
            self._piece_bytes = min(2 * self._piece_bytes, MAX_PIECE_BYTES) if goes_on else PIECE_BYTES
            self._held = self.piece(at, min(max(count, self._piece_bytes), size - at), version)
            self._held_at = at
        return self._held[at - self._held_at :][:count]

    def piece(self, at: int, count: int, version: Version) -> bytes:
        try:
            return self._object.read_range(at, count, version=str(version[1]))
        except FileExistsError:
            raise SourceChangedError(self._object) from None


class ForwardReader:
    """Reads a part of a file once and forward, in large pieces, of which the next ones are on their way."""

    def __init__(self, file: SourceFile, start: int, stop: int, threads: ThreadPoolExecutor) -> None:
        self._file, self._stop, self._threads = file, stop, threads
        self._held_at, self._held, self._next = start, bytearray(), start
        self._coming: deque[tuple[int, Future[bytes]]] = deque()

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes from `at`, fewer at `stop`; `at` must not be before an earlier call's.

        Raises OSError, SourceChangedError.
        """
        end = min(at + count, self._stop)
        while at < end and self._held_at + len(self._held) < end:
            while self._coming and self._coming[0][0] + AHEAD_BYTES <= at:
                self._coming.popleft()[1].cancel()
            if not self._coming:
                self._next = max(self._next, at)  # the piece is not read if a member that nobody wants fills it
            while len(self._coming) < PIECES_AHEAD and self._next < self._stop:
                length = min(AHEAD_BYTES, self._stop - self._next)
                self._coming.append((self._next, self._threads.submit(self._file.read_piece, self._next, length)))
                self._next += length
            start, piece = self._coming.popleft()
            del self._held[: at - self._held_at]
            self._held_at = start - len(self._held)
            self._held += piece.result()
        return bytes(memoryview(self._held)[at - self._held_at : end - self._held_at])


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
