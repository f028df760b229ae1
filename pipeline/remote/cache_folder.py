"""The cache folder of one process, removed with it; the next process removes a killed one's."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from ...storage.files import user_cache
from ...storage.lock import FileLock, LockedError

VARIABLE = "THERMOPILE_CACHE"
_PREFIX = "dataset-"


def cache_root() -> Path:
    """Return the folder of all caches: $THERMOPILE_CACHE, else the user's usual cache folder."""
    return Path(os.environ.get(VARIABLE) or user_cache())


def free_bytes() -> int:
    """Return the free bytes of the caches' disk."""
    root = cache_root()
    while not root.exists():
        root = root.parent
    return shutil.disk_usage(root).free


class CacheFolder:
    """A new, empty folder that no other process uses; `remove` deletes it.

    A lock beside it names its process. Folders without a live process, which may be half-written, are deleted first.
    """

    def __init__(self) -> None:
        root = cache_root()
        root.mkdir(parents=True, exist_ok=True)
        _remove_dead(root)
        self._lock_path, self._lock = _new_lock(root)
        self.path = self._lock_path.with_suffix("")
        self.path.mkdir(mode=0o700)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        self._lock.release()


def _new_lock(root: Path) -> tuple[Path, FileLock]:
    while True:
        path = root / f"{_PREFIX}{secrets.token_hex(8)}.lock"
        with suppress(LockedError):  # locked by a process that cleans up, between the file's creation and its lock
            return path, FileLock(path)


def _remove_dead(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*.lock"):
        with suppress(LockedError, OSError):
            lock = FileLock(path)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink(missing_ok=True)
            lock.release()
