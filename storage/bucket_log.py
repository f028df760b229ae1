"""Files that grow on this machine during training, and are kept in parts in a bucket: a part is put at each checkpoint.

A part's name says which bytes of the file it holds, so consecutive parts make up the file. Putting merges old parts:
a part is at least twice as long as the next, up to MAX_PART_BYTES, so that there are few. Its name begins with its
writer's term: from a later writer's first byte on, earlier writers' parts do not count. So no object's content ever
changes, and a request that arrives late changes nothing.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from .bucket import Address
from .files import open_own, refuse_link

MAX_PART_BYTES = 64 << 20
"""Parts are merged up to this length: a checkpoint never puts more than twice as much."""
_NAME = re.compile(r"[0-9a-f]{8}-([0-9]{15})-[0-9]{15}\.part")
T = TypeVar("T")


class LogPart(NamedTuple):
    """Bytes start … end − 1 of a file; its object may hold more, which a later writer replaced."""

    start: int
    end: int
    name: str
    """The object's name, which begins with its writer's term."""

    def of(self, folder: Address) -> Address:
        return folder / self.name


class PartsReader:
    """Reads the file that the parts make up at present."""

    def __init__(self, folder: Address) -> None:
        """Raises OSError if the store fails."""
        self._folder, self._parts = folder, _whole(_listed(folder))

    @property
    def size(self) -> int:
        return self._parts[-1].end if self._parts else 0

    def modified(self) -> float:
        """Return the time of the last part, in seconds since 1970. Raises FileNotFoundError if there is none."""
        return self._again_if_merged(self._modified)

    def read(self, start: int, length: int) -> bytes:
        return self._again_if_merged(lambda: self._read(start, length))

    def _again_if_merged(self, reading: Callable[[], T]) -> T:
        """Repeat with a new listing if a part was merged meanwhile."""
        try:
            return reading()
        except FileNotFoundError:
            self._parts = _whole(_listed(self._folder))
            return reading()

    def _modified(self) -> float:
        if not self._parts:
            raise FileNotFoundError(f"{self._folder} has no part yet")
        return self._parts[-1].of(self._folder).modified()

    def _read(self, start: int, length: int) -> bytes:
        wanted = [(part, max(start, part.start), min(start + length, part.end)) for part in self._parts]
        return b"".join(
            part.of(self._folder).read_range(low - part.start, high - low) for part, low, high in wanted if low < high
        )


class BucketLog:
    """A file on this machine, and its parts below an address, which other machines read."""

    is_late: ClassVar[bool] = True

    def __init__(self, folder: Address, file: Path) -> None:
        self._folder, self._file, self._term = folder, file, folder.lease.term if folder.lease else "0" * 8
        self._parts: list[LogPart] = []
        self._unneeded: list[str] = []
        self._inode: int | None = None

    def opened(self) -> PartsReader:
        return PartsReader(self._folder)

    def modified(self) -> float:
        return PartsReader(self._folder).modified()

    def begin(self, *, resuming: bool, exactly: bool = False) -> None:
        refuse_link(self._file)
        listed = _listed(self._folder) if resuming else []
        self._parts = _whole(listed)
        needed = {part.name for part in self._parts}
        self._unneeded = [part.name for part in listed if part.name not in needed]
        if not resuming:
            self._file.unlink(missing_ok=True)
        elif not self._goes_on():
            with os.fdopen(open_own(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                for part in self._parts:
                    file.write(part.of(self._folder).read_range(0, part.end - part.start))
        if exactly and self._file.exists():
            os.truncate(self._file, self._end)
            self._inode = self._file.stat().st_ino

    def settle(self) -> None:
        size = self._file.stat().st_size if self._file.exists() else 0
        if size and self._inode != self._file.stat().st_ino:  # rewritten: its lines have moved
            self._unneeded += [part.name for part in self._parts]
            self._parts = []
            return
        # Last part first, so that the parts never have a gap.
        for part in reversed([part for part in self._parts if part.start >= size]):
            part.of(self._folder).delete()
        # A truncated part is put again, whole, with the next lines.
        self._unneeded += [part.name for part in self._parts if part.start < size < part.end]
        self._parts = [part for part in self._parts if part.end <= size]

    def put(self) -> None:
        if not self._file.exists():
            return
        with os.fdopen(open_own(self._file, os.O_RDONLY), "rb") as file:
            end = _end_of_lines(file.fileno(), self._end)
            start, kept = self._end, list(self._parts)
            if start == end:
                return
            # A part that is short beside those that follow it is merged with them.
            while kept and end - kept[-1].start <= MAX_PART_BYTES and kept[-1].end - kept[-1].start < 2 * (end - start):
                start = kept.pop().start
            for begin in range(start, end, MAX_PART_BYTES):
                stop = min(end, begin + MAX_PART_BYTES)
                part = LogPart(begin, stop, f"{self._term}-{begin:015d}-{stop:015d}.part")
                part.of(self._folder).write(os.pread(file.fileno(), part.end - begin, begin))
                kept.append(part)
        written = {part.name for part in kept}
        self._unneeded += [part.name for part in self._parts if part.name not in written]
        self._parts = kept
        self._folder.remove(self._unneeded)
        self._unneeded = []

    @property
    def _end(self) -> int:
        return self._parts[-1].end if self._parts else 0

    def _goes_on(self) -> bool:
        """Return whether the local file begins with the parts' bytes, judged by its size and the last part."""
        if not self._file.exists() or self._file.stat().st_size < self._end:
            return False
        if not self._parts:
            return True
        last = self._parts[-1]
        with os.fdopen(open_own(self._file, os.O_RDONLY), "rb") as file:
            held = os.pread(file.fileno(), last.end - last.start, last.start)
        return held == last.of(self._folder).read_range(0, last.end - last.start)


def _listed(folder: Address) -> list[LogPart]:
    found = ((_NAME.fullmatch(name), size) for name, size, _ in folder.listing())
    return [LogPart(int(name[1]), int(name[1]) + size, name[0]) for name, size in found if name]


def _whole(parts: Iterable[LogPart]) -> list[LogPart]:
    """Return the consecutive parts from the start of the file, without parts that were merged into another."""
    found = standing((part.name[:8], part.start, part) for part in parts)
    whole, end = [], 0
    longest_first = sorted(found, key=lambda one: (one[1].start, -one[1].end))
    for part in (part._replace(end=min(part.end, limit)) for limit, part in longest_first):
        if part.start == end < part.end:
            whole.append(part)
            end = part.end
    return whole


def standing(found: Iterable[tuple[str, int, T]]) -> Iterator[tuple[int, T]]:
    """Yield the things that count, given writers' terms and places, each with the place at which it ends.

    A later writer's first place ends the things of earlier writers: they arrived late, or the work behind them was
    redone.
    """
    limit = sys.maxsize
    for _, of_term in groupby(sorted(found, key=itemgetter(0), reverse=True), itemgetter(0)):
        before = [(place, thing) for _, place, thing in of_term if place < limit]
        yield from ((limit, thing) for _, thing in before)
        limit = min([limit, *(place for place, _ in before)])


def _end_of_lines(descriptor: int, start: int) -> int:
    """Return the end of the last complete line. start: where a line begins."""
    end = os.fstat(descriptor).st_size
    while end > start:
        begin = max(start, end - (1 << 20))
        if (newline := os.pread(descriptor, end - begin, begin).rfind(b"\n")) >= 0:
            return begin + newline + 1
        end = begin
    return start
