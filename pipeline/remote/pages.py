"""Writes ranges of objects into sparse files, and frees the pages of the disk that no range kept uses any more."""

from __future__ import annotations

from pathlib import Path
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from . import sparse
from .plan import PAGE, Ids, pages_of


class Pages:
    """Counts the ranges that use each page: samples of several blocks may lie in one. Thread-safe."""

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self._uses: dict[Path, NDArray[np.uint16]] = {}

    def write(self, path: Path, size: int, starts: Ids, stops: Ids, data: bytes) -> None:
        """Write and keep ranges of a file of `size` bytes, int64 [k] each, as `sparse.write`. Raises OSError."""
        with self._lock:  # before the bytes are there: another block's end must not free them
            uses = self._uses.setdefault(path, np.zeros(-(-size // PAGE), np.uint16))
            np.add.at(uses, pages_of(starts, stops), 1)
        sparse.write(path, starts, stops, data)

    def free(self, path: Path, starts: Ids, stops: Ids) -> None:
        """Let go of ranges that were written."""
        with self._lock:
            uses, pages = self._uses[path], pages_of(starts, stops)
            np.subtract.at(uses, pages, 1)
            unused = np.unique(pages[uses[pages] == 0])
            for run in np.split(unused, np.flatnonzero(np.diff(unused) > 1) + 1) if len(unused) else ():
                sparse.drop(path, int(run[0]) * PAGE, int(run[-1] + 1) * PAGE)
            if not uses.any():
                del self._uses[path]

    def forget(self, path: Path, size: int) -> None:
        """Free all of a file."""
        with self._lock:
            self._uses.pop(path, None)
            sparse.drop(path, 0, -(-size // PAGE) * PAGE)
