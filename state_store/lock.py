"""The writer lock: an advisory lock on a file next to the repository, so that a store has one writer."""

import fcntl
import os
import socket
from pathlib import Path

from ..files import open_own
from .errors import StoreLockedError


class WriterLock:
    """Held from construction until `release` or until the process ends, however it ends.

    The file `<repository>.lock` is never removed, because removing it would race with the next writer. Readers need no
    lock: a committed snapshot never changes.
    Raises StoreLockedError naming the process and host that hold the lock, NotRegularFileError if the file is a link.
    """

    def __init__(self, repository: Path) -> None:
        self.path = repository.with_name(repository.name + ".lock")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_own(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 256, 0).decode(errors="replace").strip() or "another process"
            os.close(self._file)
            raise StoreLockedError(
                f"{repository} is being written by {holder} (lock: {self.path}). "
                "Wait for it, stop it, or read the store with StateReader, which needs no lock"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)
