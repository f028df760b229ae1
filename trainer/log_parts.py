"""Files that grow on this machine while a run trains, and in a bucket are parts: one is put at each checkpoint.

A part is named by the place of its first byte in the file, so parts that follow each other make up the file. Old parts
are merged as they are put: a part is at least twice as long as the next, up to MAX_PART_BYTES, so that there are few.
"""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..files import open_own, refuse_link
from ..objects import Address, delete_all

MAX_PART_BYTES = 64 << 20
"""Parts are merged up to this length: a checkpoint never puts more than twice as much."""
_NAME = re.compile(r"([0-9]{15})\.part")
T = TypeVar("T")


class Part(NamedTuple):
    """Bytes start … end − 1 of a file."""

    start: int
    end: int


class LogReader:
    """The file that the parts make up, as of now."""

    def __init__(self, folder: Address) -> None:
        """Raises OSError if the store fails."""
        self._folder, self._parts = folder, _whole(_listed(folder))

    @property
    def size(self) -> int:
        return self._parts[-1].end if self._parts else 0

    def modified(self) -> float:
        """Return when the last part was put, in seconds since 1970. Raises FileNotFoundError if there is none."""
        return self._again_if_merged(self._modified)

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start` on, fewer at the end."""
        return self._again_if_merged(lambda: self._read(start, length))

    def _again_if_merged(self, reading: Callable[[], T]) -> T:
        """List the parts again if one was merged into the one before meanwhile."""
        try:
            return reading()
        except FileNotFoundError:
            self._parts = _whole(_listed(self._folder))
            return reading()

    def _modified(self) -> float:
        if not self._parts:
            raise FileNotFoundError(f"{self._folder} has no part yet")
        return _object(self._folder, self._parts[-1].start).modified()

    def _read(self, start: int, length: int) -> bytes:
        stop = min(start + length, self.size)
        wanted = [Part(max(start, part.start), min(stop, part.end)) for part in self._parts]
        pieces = [
            _object(self._folder, part.start).read_range(piece.start - part.start, piece.end - piece.start)
            for part, piece in zip(self._parts, wanted, strict=True)
            if piece.start < piece.end
        ]
        return b"".join(pieces)


class LogParts:
    """Writes the parts of one file. For the run's writer only."""

    def __init__(self, folder: Address, file: Path) -> None:
        self._folder, self._file = folder, file
        self._parts: list[Part] = []
        self._unneeded: list[Address] = []
        self._inode: int | None = None

    def begin(self, *, resuming: bool) -> None:
        """Make the local file what the parts hold; one that goes on from there stays as it is.

        resuming: if not, it begins empty.
        """
        refuse_link(self._file)
        listed = _listed(self._folder) if resuming else []
        self._parts = _whole(listed)
        self._unneeded = [_object(self._folder, part.start) for part in listed if part not in self._parts]
        if not resuming:
            self._file.unlink(missing_ok=True)
        elif not self._goes_on():
            self._download()

    def fetch(self) -> None:
        """As `begin`, but drop what the local file has beyond the parts."""
        self.begin(resuming=True)
        if self._file.exists():
            os.truncate(self._file, self._end)
            self._inode = self._file.stat().st_ino

    def settle(self) -> None:
        """Drop the parts that are beyond the local file, which was cut since `fetch`."""
        size = self._file.stat().st_size if self._file.exists() else 0
        if size and self._inode != self._file.stat().st_ino:  # rewritten: its lines are at other places now
            self._unneeded += [_object(self._folder, part.start) for part in self._parts[1:]]
            self._parts = []
            return
        # The last one first: parts never have a gap.
        for part in reversed([part for part in self._parts if part.start >= size]):
            _object(self._folder, part.start).delete()
        # One that was cut is put again, whole, with the next lines.
        self._parts = [part for part in self._parts if part.end <= size]

    def put(self) -> None:
        """Put the lines added since the last time. Raises OSError; the next call then puts them."""
        if not self._file.exists():
            return
        with os.fdopen(open_own(self._file, os.O_RDONLY), "rb") as file:
            end = _end_of_lines(file.fileno(), self._end)
            start, kept = self._end, list(self._parts)
            if start == end:
                return
            while kept and _is_short(kept[-1], start, end):
                start = kept.pop().start
            for place in range(start, end, MAX_PART_BYTES):
                part = Part(place, min(end, place + MAX_PART_BYTES))
                _object(self._folder, place).write(os.pread(file.fileno(), part.end - place, place))
                kept.append(part)
        self._unneeded += [_object(self._folder, part.start) for part in self._parts if part.start > start]
        self._parts = kept
        delete_all(self._unneeded)
        self._unneeded = []

    @property
    def _end(self) -> int:
        return self._parts[-1].end if self._parts else 0

    def _goes_on(self) -> bool:
        """Return whether the local file begins with what the parts hold, as far as its size and the last part tell."""
        if not self._file.exists() or self._file.stat().st_size < self._end:
            return False
        if not self._parts:
            return True
        last = self._parts[-1]
        with os.fdopen(open_own(self._file, os.O_RDONLY), "rb") as file:
            held = os.pread(file.fileno(), last.end - last.start, last.start)
        return held == _object(self._folder, last.start).read(2 * MAX_PART_BYTES)

    def _download(self) -> None:
        with os.fdopen(open_own(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            for part in self._parts:
                file.write(_object(self._folder, part.start).read(2 * MAX_PART_BYTES))


def _listed(folder: Address) -> list[Part]:
    found = ((_NAME.fullmatch(name), size) for name, size in folder.objects())
    return [Part(int(name[1]), int(name[1]) + size) for name, size in found if name]


def _whole(parts: Iterable[Part]) -> list[Part]:
    """Return the parts that follow each other from the start, without those that were merged into one before them."""
    whole, end = [], 0
    for part in sorted(parts):
        if part.start == end < part.end:
            whole.append(part)
            end = part.end
    return whole


def _is_short(part: Part, start: int, end: int) -> bool:
    """Return whether the bytes start … end − 1, which follow a part, are to be merged with it."""
    return part.end - part.start < 2 * (end - start) and end - part.start <= MAX_PART_BYTES


def _end_of_lines(descriptor: int, start: int) -> int:
    """Return where the last whole line ends: one may be half written. start: where a line begins."""
    end = os.fstat(descriptor).st_size
    while end > start:
        begin = max(start, end - (1 << 20))
        if (newline := os.pread(descriptor, end - begin, begin).rfind(b"\n")) >= 0:
            return begin + newline + 1
        end = begin
    return start


def _object(folder: Address, start: int) -> Address:
    return folder / f"{start:015d}.part"
