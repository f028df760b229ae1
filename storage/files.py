"""Durable file operations that are safe on untrusted paths.

A directory from another person may hold links, pipes and devices, so an opened file is checked to be regular, and
nothing is written through a link. Reads follow links.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MAX_TEXT_BYTES = 64 << 20
"""Settings, indexes and similar files are far smaller. A larger file is not ours and could exhaust memory."""

_BESIDE = re.compile(r"\..+\.([A-Za-z0-9-]+-)?[0-9]+\.partial")
"""Names of `written_aside`'s temporary files; earlier versions left out the host."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_libc = ctypes.CDLL(None, use_errno=True)
_DRAWN = secrets.token_hex(4)


class NotRegularFileError(OSError):
    """The path is not a regular file, or not a real directory where one is expected."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, following links; never blocks on a pipe.

    Raises NotRegularFileError for anything else, and OSError if it cannot be opened.
    """
    return os.fdopen(open_regular_descriptor(path), "rb")


def open_regular_descriptor(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open as `open_regular` does, but return the file descriptor. flags: as for os.open."""
    # O_NONBLOCK: opening a pipe that has no writer would block forever.
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise NotRegularFileError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file")
    return descriptor


class RegularFile:
    """An open regular file, or the target of a link; it closes when garbage-collected.

    Raises NotRegularFileError, OSError.
    """

    def __init__(self, path: str | os.PathLike[str], flags: int = 0) -> None:
        """flags: as for os.open, such as O_NOFOLLOW."""
        self.number = open_regular_descriptor(path, flags)
        weakref.finalize(self, os.close, self.number).atexit = False

    @property
    def size(self) -> int:
        """Length in bytes."""
        return os.fstat(self.number).st_size

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`, fewer at the end."""
        return os.pread(self.number, length, start)


def read_regular(path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file. Raises as `open_regular`, and OSError if it exceeds `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"{path} is larger than the limit for such a file, {max_bytes:,} bytes")
    return data


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for in-place changes and return its descriptor. flags: as for os.open; O_CREAT creates it.

    Raises NotRegularFileError if `path` is a link, has a second hard link, or is not a regular file: writing would
    change something outside its directory.
    """
    try:
        descriptor = open_regular_descriptor(path, flags | os.O_NOFOLLOW)
    except OSError:
        if os.path.islink(path):
            raise NotRegularFileError(f"{path} is a link, and no file is written through links; remove it") from None
        raise
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise NotRegularFileError(f"{path} has a second hard link, which writing changes too; replace it with a copy")
    return descriptor


def user_cache() -> Path:
    """Return this user's folder for what can be made again. Raises RuntimeError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thermopile"


def may_make(folder: Path) -> bool:
    """Return whether a folder is writable, or can be made."""
    nearest = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which may not exist yet."""
    return shutil.disk_usage(next(each for each in (folder, *folder.absolute().parents) if each.exists())).free


def own_directory(path: Path) -> Path:
    """Create a directory if needed and return it. Raises NotRegularFileError if `path` is a link or not a directory."""
    with suppress(FileExistsError):
        path.mkdir()
    refuse_link(path)
    if not path.is_dir():
        raise NotRegularFileError(f"{path} is not a directory; remove it")
    return path


def refuse_link(path: Path) -> None:
    """Raise NotRegularFileError if `path` itself is a link, since files below it would be written elsewhere."""
    if path.is_symlink():
        raise NotRegularFileError(f"{path} is a link, and no file is written through links; replace it with its target")


def is_still(path: Path, descriptor: int) -> bool:
    """Return whether the path still names the open file, which may have been removed or replaced."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_atomically(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a temporary file next to `path`, flush it, and rename it over `path`; a link there is replaced.

    replace: if False, raise FileExistsError if the path is taken, even by a concurrent writer.
    """
    with written_aside(path, replace=replace) as file:
        file.write(data)


@contextmanager
def written_aside(to: Path, *, replace: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that is flushed and renamed to `to` when the block ends, or removed if it fails.

    replace: as for `write_atomically`.
    Raises NotRegularFileError if `to` is a device, a pipe or a directory, since replacing it would destroy it.
    """
    with suppress(FileNotFoundError):
        kind = stat.S_IFMT(to.lstat().st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFLNK):
            raise NotRegularFileError(
                f"{to} is {_KINDS.get(kind, 'not a regular file')}, which a file cannot replace; choose another name"
            )
    beside = to.with_name(f".{to.name}.{writer_name()}.partial")
    beside.unlink(missing_ok=True)
    try:
        with beside.open("xb") as file:  # x: never write through a link
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            beside.replace(to)
        else:
            _rename_to_free(beside, to)
    finally:
        beside.unlink(missing_ok=True)
    sync(to.parent)


def _rename_to_free(path: Path, to: Path) -> None:
    """Rename a file. Raises FileExistsError if the new name is taken."""
    try:
        os.link(path, to)  # a rename would replace a file that another process has just written
        path.unlink()
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV):
            raise
        # No hard links, as on exFAT and many FUSE mounts: writers on this machine take turns.
        directory = os.open(to.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            if os.path.lexists(to):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(to)) from None
            path.rename(to)
        finally:
            os.close(directory)


def writer_name() -> str:
    """Return a name for this process, unique among all machines that share its file system, to put in a file's name.

    Containers may share the host's name and have equal pids, so it includes a random number.
    """
    return f"{re.sub('[^A-Za-z0-9]', '-', socket.gethostname())}-{_DRAWN}-{os.getpid()}"


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files of killed writers. Only the process that writes in `directory` may call this."""
    for path in directory.glob(".*.partial"):
        if _BESIDE.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file's content, or a directory's entries; a rename is not durable until its directory is flushed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_through(directory: Path) -> Iterator[None]:
    """Flush the file system of `directory` once the block succeeds, so that everything it wrote lasts.

    One syncfs call covers files, names and directories. It is far faster than an fsync for each of a thousand files,
    but also waits for other programs' writes. Raises OSError if writing failed, for example on a full disk.
    """
    # Open first: a write-back error that occurs before a descriptor is opened is not reported to that descriptor.
    opened = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
        sync_file_system(opened)
    finally:
        os.close(opened)


def sync_file_system(opened: int) -> None:
    """Flush the file system of an open file. Raises OSError."""
    if _libc.syncfs(opened) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal. Raises as `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
