"""Fetch ranges of objects into the files of a cache, concurrently."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple

from ...storage.bucket import Address
from ...storage.bucket_errors import ObjectStoreError
from .pages import Pages
from .plan import Ids

SIDE_BY_SIDE = 16
"""Concurrent requests: at 20 ms each, small ranges arrive at 800 a second."""


class CachedFile(NamedTuple):
    """An object, and the file with the parts of it that are cached."""

    address: Address
    path: Path
    size: int
    version: str = ""
    """Its ETag, if another object of this name is to be refused."""


class Fetch(NamedTuple):
    """A request for neighbouring ranges of an object."""

    file: CachedFile
    starts: Ids
    stops: Ids
    """int64 [k] each, ascending."""
    arrived: Callable[[], None]
    """Called when the cache's file has the ranges."""


class Fetcher:
    """Threads that fetch. Raises the errors of `Address.read_range` and of the disk."""

    def __init__(self, pages: Pages, name: str) -> None:
        self._pages = pages
        self._threads, self._ended = ThreadPoolExecutor(SIDE_BY_SIDE, f"thermopile-{name}"), Event()

    def fetch(self, jobs: Sequence[Fetch]) -> None:
        """Fetch all ranges; return once each has arrived or failed, and raise the first error.

        If the caller is interrupted, requests are no longer retried: a process waits for its threads before it ends.
        """
        first: Exception | None = None
        futures = [self._threads.submit(self._fetch, job, self._ended) for job in jobs]
        try:
            for future in futures:
                try:  # not `wait`, which misses the futures that `close` cancels
                    future.result()
                except Exception as error:  # noqa: BLE001 (raised below, once no request is pending)
                    first = first or error
        except BaseException:
            for future in futures:
                future.cancel()
            self._ended.set()
            self._ended = Event()  # the caller may continue later
            raise
        if first is not None:
            raise first

    def _fetch(self, job: Fetch, ended: Event) -> None:
        (address, path, size, version), start, stop = job.file, int(job.starts[0]), int(job.stops[-1])
        data = address.read_range(start, stop - start, ended, version)
        if len(data) != stop - start:
            raise ObjectStoreError(
                f"{address} ends at byte {start + len(data):,}, before {stop:,}; it was "
                "changed after the dataset was opened"
            )
        self._pages.write(path, size, job.starts, job.stops, data)
        job.arrived()

    def close(self) -> None:
        """Drop queued requests. A request under way ends by itself, within its timeout, and is not retried."""
        self._ended.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


class WaitClock:
    """Time during which at least one caller waits for the store."""

    def __init__(self) -> None:
        self._lock, self._waiting, self._since, self._total = Lock(), 0, 0.0, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's time."""
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
        with self._lock:
            return self._total + (time.perf_counter() - self._since if self._waiting else 0.0)
