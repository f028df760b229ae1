"""Files that are whole or absent, also after a power cut, and that are never somebody else's.

The ground floor of everything that touches a disk. A directory that somebody sends may hold links, pipes and devices:
what is read is a regular file once it is open, and nothing is written through a link. Reading follows links.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MAX_TEXT_BYTES = 64 << 20
"""Settings, indexes and their like are far smaller; a larger file is none of ours, and would fill the memory."""

_BESIDE = re.compile(r"\..+\.[0-9]+\.partial")
"""What `written_aside` writes to."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


class NotRegularFileError(OSError):
    """A regular file, or a directory of one's own, was expected, and something else stands there."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or what a chain of links leads to, for reading; never waits for a pipe's other end.

    Raises NotRegularFileError for anything else, and OSError where it cannot be opened.
    """
    return os.fdopen(open_regular_descriptor(path), "rb")


def open_regular_descriptor(path: str | os.PathLike[str]) -> int:
    """Do as `open_regular`, and return the descriptor."""
    return _open(path, os.O_RDONLY)


def read_regular(path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the bytes of a regular file. Raises as `open_regular`, and OSError for more than `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"{path} has more than {max_bytes:,} bytes; it is not what it should be")
    return data


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file to change it in place, and return its descriptor; flags as of os.open, with O_CREAT to make it.

    Raises NotRegularFileError where `path` is a link, a file with a second name, or no regular file: writing there
    would change something outside of the directory that it stands in.
    """
    try:
        descriptor = _open(path, flags | os.O_NOFOLLOW)
    except OSError:
        if os.path.islink(path):
            raise NotRegularFileError(f"{path} is a link, and nothing is written through one; remove it") from None
        raise
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise NotRegularFileError(
            f"{path} has a second name (a hard link), which writing would change as well; put a copy in its place"
        )
    return descriptor


def own_directory(path: Path) -> Path:
    """Make a directory, or find that it is one and no link to one, and return it. Raises NotRegularFileError."""
    with suppress(FileExistsError):
        path.mkdir()
    refuse_link(path)
    if not path.is_dir():
        raise NotRegularFileError(f"{path} is not a directory; remove it")
    return path


def refuse_link(path: Path) -> None:
    """Raise NotRegularFileError where `path` itself is a link: what is written below it would land elsewhere."""
    if path.is_symlink():
        raise NotRegularFileError(f"{path} is a link, and nothing is written through one; put what it names there")


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path`, flush to disk, then take its place; a link of that name is replaced, not followed."""
    with written_aside(path) as file:
        file.write(data)


@contextmanager
def written_aside(to: Path) -> Iterator[BinaryIO]:
    """Open a file beside `to` that takes its place at the end, on the disk; removed where anything fails.

    Raises NotRegularFileError where `to` is a device, a pipe or a directory: it would be gone, for all who use it.
    """
    _refuse_to_replace(to)
    # With the process's number: two that write to one name must not write into one file.
    beside = to.with_name(f".{to.name}.{os.getpid()}.partial")
    beside.unlink(missing_ok=True)
    try:
        with beside.open("xb") as file:  # x: never through a link
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(to)
    finally:
        beside.unlink(missing_ok=True)
    sync(to.parent)


def _refuse_to_replace(path: Path) -> None:
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if kind not in (stat.S_IFREG, stat.S_IFLNK):
        raise NotRegularFileError(
            f"{path} is {_KINDS.get(kind, 'no regular file')}, which no file can take the place of; choose another name"
        )


def remove_leftovers(directory: Path) -> None:
    """Remove what kills left of files that were to be written aside; for the one process that writes there now."""
    for path in directory.glob(".*.partial"):
        if _BESIDE.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file's content to disk, or a directory's names: a rename is not durable before."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(*files: Path) -> str:
    """Return the sha256 of the files' bytes, one file after the other, in hexadecimal. Raises as `open_regular`."""
    digest = hashlib.sha256()
    for path in files:
        with open_regular(path) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _open(path: str | os.PathLike[str], flags: int) -> int:
    # Without waiting: a pipe that nobody writes to would hold the program up for ever.
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise NotRegularFileError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file")
    return descriptor
