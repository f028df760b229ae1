"""Fetch ranges of objects into the files of a cache, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple

from ...storage.bucket import Address, ObjectStoreError
from . import sparse

SIDE_BY_SIDE = 16
"""Requests at once: with 20 ms each, small ranges come at 800 a second."""


class Fetch(NamedTuple):
    """A range of a file to fetch."""

    name: str
    start: int
    stop: int
    arrived: Callable[[], None]
    """Called when the cache's file has it."""


class Fetcher:
    """Some threads that fetch into one folder. Errors are those of `Address.read_range` and of the disk."""

    def __init__(self, address: Address, folder: Path, name: str) -> None:
        self._address, self._folder = address, folder
        self._threads, self._ended = ThreadPoolExecutor(SIDE_BY_SIDE, f"thermopile-{name}"), Event()

    def fetch(self, jobs: Sequence[Fetch]) -> None:
        """Fetch all ranges, and return when each has come or failed; raise the first error.

        If the caller is interrupted, no request is repeated any more: a process waits for its threads before it ends.
        """
        first: Exception | None = None
        futures = [self._threads.submit(self._fetch, job, self._ended) for job in jobs]
        try:
            for future in futures:
                try:  # not `wait`, which does not notice what `close` cancels
                    future.result()
                except Exception as error:  # noqa: BLE001 (raised below, when nothing is on its way any more)
                    first = first or error
        except BaseException:
            for future in futures:
                future.cancel()
            self._ended.set()
            self._ended = Event()  # the caller may go on later
            raise
        if first is not None:
            raise first

    def _fetch(self, job: Fetch, ended: Event) -> None:
        address = self._address / job.name
        data = address.read_range(job.start, job.stop - job.start, ended)
        if len(data) != job.stop - job.start:
            raise ObjectStoreError(
                f"{address} ends at byte {job.start + len(data):,}, before {job.stop:,}; it was "
                "changed after the dataset was opened"
            )
        sparse.write(self._folder / job.name, job.start, data)
        job.arrived()

    def close(self) -> None:
        """Drop what is queued. A request under way ends by itself, within its time-out, and is not repeated."""
        self._ended.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


class WaitClock:
    """The time in which at least one caller waits for the store."""

    def __init__(self) -> None:
        self._lock, self._waiting, self._since, self._total = Lock(), 0, 0.0, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block."""
        with self._lock:
            if not self._waiting:
                self._since = time.perf_counter()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._total += time.perf_counter() - self._since

    def seconds(self) -> float:
        """Return the seconds until now."""
        with self._lock:
            return self._total + (time.perf_counter() - self._since if self._waiting else 0.0)
