"""An advisory lock on a file that names its holder: a directory has one writer."""

import fcntl
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import ClassVar, NamedTuple

from .files import is_still, open_own, open_regular


class LockedError(Exception):
    """Another process, or this one, holds the lock. holder: `pid N on HOST`, as far as known."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"held by {holder}")
        self.holder = holder


class TakenOverError(Exception):
    """Another process took over the lock, and began to write, after this process was cut off."""


class FileLock:
    """Held from construction until `release`, or until the process ends, however it ends.

    shared: several processes may share the lock, but not with an exclusive holder; the file does not name them.
    Removing the file requires an exclusive lock. Raises LockedError; FileNotFoundError if the directory is
    missing; NotRegularFileError if the file is a link; OSError, with a cure, if its file system has no locks.
    """

    writer: ClassVar[None] = None
    """None: nothing names the holder once it is gone, unlike a lock in a bucket."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        while True:
            self._file = open_own(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(self._file)
                os.close(self._file)
                raise LockedError(holder or "another process") from None
            except OSError as error:
                os.close(self._file)
                cure = "mount NFS with its lock service, Lustre with -o flock, or write to a disk that has file locks"
                raise OSError(error.errno, f"{error.strerror}; {cure}", str(path)) from error
            if is_still(path, self._file):
                break
            os.close(self._file)  # its holder removed the file meanwhile: lock the new file
        if shared:
            return
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError:  # a full disk
            os.close(self._file)
            raise

    def is_last(self) -> bool:
        """Return whether no other process shares the lock; if so, hold it exclusively until `release`."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)


@contextmanager
def own_folder(root: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder that no other process uses, and remove it at the end; first those of killed processes.

    A lock beside it names its process. Folders without a live process may be half-written, or half-removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    for file in root.glob(f"{prefix}*.lock"):
        with suppress(LockedError, OSError):
            lock = FileLock(file)
            shutil.rmtree(file.with_suffix(""), ignore_errors=True)
            file.unlink(missing_ok=True)
            lock.release()
    while True:
        file = root / f"{prefix}{token_hex(8)}.lock"
        with suppress(LockedError):  # by a process that cleans up, between the file's creation and its lock
            lock = FileLock(file)
            break
    folder = file.with_suffix("")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        file.unlink(missing_ok=True)
        lock.release()


class LockStatus(NamedTuple):
    holder: str | None
    """`pid N on HOST`; None if it is free."""
    is_held: bool
    age: float
    """Seconds since it was written."""
    is_renewed: bool
    """Whether the holder keeps writing it even when idle: its age then says nothing about the holder's work."""


def file_lock_status(path: Path) -> LockStatus:
    holder, is_held = lock_holder(path)
    age = max(0.0, time.time() - path.stat().st_mtime) if path.exists() else math.inf
    return LockStatus(holder, is_held, age, False)


def lock_holder(path: Path) -> tuple[str | None, bool]:
    """Return the process that the lock file names, None if released, and whether it still holds the lock."""
    try:
        with open_regular(path) as file:
            if not (holder := _holder(file.fileno())):
                return None, False
            # A shared lock, released at once, can only block a writer that starts at this very moment.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder, True
    except OSError:
        return None, False
    return holder, False


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 256, 0).decode(errors="replace").strip()
