"""Fetch ranges of objects into the files of a cache, concurrently."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple

from ...storage.bucket import Address
from ...storage.bucket_errors import ObjectStoreError
from ...storage.files import open_own

SIDE_BY_SIDE = 16
"""Concurrent requests: at 20 ms each, small ranges arrive at 800 a second."""


class Fetch(NamedTuple):
    """A request for a range of an object."""

    address: Address
    version: str
    """The ETag, if another object of this name is to be refused; else empty."""
    start: int
    stop: int
    store: Callable[[bytes], None]
    """Writes the answer to the cache."""


class Fetcher:
    """Threads that fetch. Raises the errors of `Address.read_range` and of the disk."""

    def __init__(self, name: str) -> None:
        self._threads, self._ended = ThreadPoolExecutor(SIDE_BY_SIDE, f"thermopile-{name}"), Event()

    def fetch(self, jobs: Sequence[Fetch]) -> None:
        """Fetch and store all ranges; return once each is stored or failed, and raise the first error.

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
        data = job.address.read_range(job.start, job.stop - job.start, ended, job.version)
        if len(data) != job.stop - job.start:
            end = job.start + len(data)
            raise ObjectStoreError(f"{job.address} ends at byte {end:,}; it was changed after the dataset was opened")
        job.store(data)

    def close(self) -> None:
        """Drop queued requests. A request under way ends by itself, within its timeout, and is not retried."""
        self._ended.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


def write(path: Path, pieces: Iterable[tuple[int, int, int]], data: bytes) -> None:
    """Write pieces of `data` to an existing file: for each its offset there, its start and its end in `data`.

    Raises OSError, naming the cache's folder, if there is no space.
    """
    descriptor, view = open_own(path, os.O_WRONLY), memoryview(data)
    try:
        for at, start, stop in pieces:
            while start < stop:
                written = os.pwrite(descriptor, view[start:stop], at)
                at, start = at + written, start + written
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} cannot be written: {error.strerror}. Set THERMOPILE_CACHE to a folder on a "
            "larger disk, or a smaller data.cache",
        ) from None
    finally:
        os.close(descriptor)


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
