"""The samples of a dataset in an object store, in a cache that fills on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

import numpy as np

from ...storage.bucket import Address
from ..dataset_files import Held
from ..dataset_index import DatasetIndex, ShardSuffix
from ..errors import DatasetError
from . import sparse
from .blocks import Blocks
from .fetching import Fetch, Fetcher, WaitClock
from .plan import MAX_GAP, PAGE, Ids, on_disk, pages_of_rows, pages_within, requests, spans_of
from .presence import ABSENT, HERE, Places, Presence
from .room import Room
from .schedule import Schedule

if TYPE_CHECKING:
    from ..shard import Shard

DEFAULT_BYTES = 1 << 30
"""Disk space for samples read without an order; samples in use at once may take more."""
REQUEST_BYTES = 8 << 20
_NEAR = 64
"""Rows next to a block that may share a page with it: a picture has more than 64 bytes."""


class CachedSamples:
    """Fetches samples into sparse files, and drops them by blocks. Records stay, 64 bytes a sample. Thread-safe."""

    def __init__(
        self,
        address: Address,
        folder: Callable[[], Path],
        index: DatasetIndex,
        sizes: Mapping[str, int],
        open_shard: Callable[[int], Shard],
    ) -> None:
        """address, folder: of the shards' files, named in `sizes` with their bytes; the folder is made when needed.

        open_shard: returns a shard whose files exist.
        """
        self.address, self.sizes = address, sizes
        self._folder, self._index, self._open_shard = folder, index, open_shard
        self.first_id = np.array(index.first_id, np.int64)
        self.clock = WaitClock()
        self.lock = RLock()
        self.presence = Presence(self.lock, self._rows_of)
        self.blocks = Blocks.without_order(index.n)
        self.room = Room(self.lock, DEFAULT_BYTES, self._drop)
        self.failure: BaseException | None = None
        """The error that ended read-ahead."""

    @cached_property
    def _fetcher(self) -> Fetcher:
        return Fetcher(self.address, self._folder(), "fetch")

    def new_fetcher(self) -> Fetcher:
        """Return separate threads for a caller, so that nobody queues behind it."""
        return Fetcher(self.address, self._folder(), "read-ahead")

    def follow(self, blocks: Blocks, limit: int, schedule: Schedule) -> None:
        """From now on, keep these blocks within `limit` bytes, and drop first the block that the schedule needs last.

        Raises RuntimeError if samples have been read.
        """
        if self.room.bytes:
            raise RuntimeError("samples have been read already; announce the windows first")
        self.blocks, self.room = blocks, Room(self.lock, limit, self._drop, schedule)

    def hold(self, ids: Ids) -> Held:
        """Fetch the samples, int64 [b] within the dataset, and keep them until the result is released.

        Raises DatasetError for a damaged record, CacheTooSmallError, OSError including ObjectStoreError.
        """
        blocks = tuple(np.unique(self.blocks.of_ids(ids)).tolist())
        self.room.enter(blocks)
        held = Held(partial(self.room.leave, blocks), partial(self.room.leave_later, blocks))
        try:
            self._bring(self._by_shard(ids))
        except BaseException:
            held.release()
            raise
        return held

    def prepare(self, shard: int) -> None:
        """Create a shard's files, unless they exist, with the header of its records."""
        self._bring_records([(shard, np.zeros(0, np.int64))])

    def bring_records(self, shard: int) -> None:
        self._bring_records([(shard, np.arange(self._rows_of(shard)))])

    def bring_ahead(self, ids: Ids, fetcher: Fetcher) -> None:
        """Fetch samples for which the caller has taken room, except samples that others are fetching.

        The others may be waiting for the caller's room.
        """
        wanted = [Places(shard, "samples", rows) for shard, rows in self._by_shard(ids)]
        claimed = self.presence.claim(wanted, self._refuse_if_ended, wait=False)
        self._fetch(claimed, self._sample_jobs, fetcher)

    def bring_records_ahead(self, ids: Ids, first_step: int, fetcher: Fetcher, check: Callable[[], None]) -> None:
        """Fetch records of samples that a window from `first_step` on needs, as soon as there is room for them.

        check: called before each look for room; raises to end the wait.
        """
        pages = self._pages_of(self._by_shard(ids))
        while claimed := self._claim_ahead(pages, first_step, check):
            self._fetch(claimed, partial(self._page_jobs, charged=False), fetcher)

    def size_on_disk(self, ids: Ids) -> int:
        """Return the bytes that a block takes on disk once its samples are cached; its records are cached already.

        Raises DatasetError for a damaged record.
        """
        size = 0
        for shard, rows in self._by_shard(ids):
            ranges = requests(
                *self._spans(shard, rows), max_gap=MAX_GAP, max_bytes=self.sizes[self._index.shard_name(shard, "beton")]
            )
            size += on_disk(np.array([each.start for each in ranges]), np.array([each.stop for each in ranges]))
        return size

    def notify_all(self) -> None:
        """Wake all callers who wait for samples or for room."""
        with self.lock:
            self.presence.changed.notify_all()
            self.room.changed.notify_all()

    # Missing samples and records.

    def _by_shard(self, ids: Ids) -> list[tuple[int, Ids]]:
        ids = np.unique(ids)
        shards = np.searchsorted(self.first_id, ids, side="right") - 1
        parts = np.split(ids, np.flatnonzero(np.diff(shards)) + 1) if len(ids) else []
        return [
            (shard := int(np.searchsorted(self.first_id, part[0], side="right") - 1), part - self.first_id[shard])
            for part in parts
        ]

    def _bring(self, by_shard: list[tuple[int, Ids]]) -> None:
        samples = [Places(shard, "samples", rows) for shard, rows in by_shard]
        if self.presence.are_here(samples):
            return
        with self.clock.waiting():
            self._bring_records(by_shard)
            self._complete(samples, self._sample_jobs)

    def _bring_records(self, by_shard: list[tuple[int, Ids]]) -> None:
        pages = self._pages_of(by_shard)
        if not self.presence.are_here(pages):
            self._complete(pages, partial(self._page_jobs, charged=True))

    def _pages_of(self, by_shard: list[tuple[int, Ids]]) -> list[Places]:
        return [Places(shard, "pages", pages_of_rows(rows)) for shard, rows in by_shard]

    def _complete(self, wanted: list[Places], jobs_of: Callable[[Places], Iterable[Fetch]]) -> None:
        """Fetch missing places, and wait for places that others are fetching."""
        while claimed := self.presence.claim(wanted, self._refuse_if_ended):
            self._fetch(claimed, jobs_of, self._fetcher)

    def _claim_ahead(self, pages: list[Places], first_step: int, check: Callable[[], None]) -> list[Places]:
        """Claim pages once there is room. Until then callers, who may hold the room, need not wait for these pages."""
        with self.lock:
            while claimed := self.presence.claim(pages, check):
                if self.room.take_ahead(None, PAGE * sum(len(each.numbers) for each in claimed), first_step):
                    break
                self.presence.failed(claimed)
                self.room.changed.wait()
            return claimed

    def _fetch(self, claimed: list[Places], jobs_of: Callable[[Places], Iterable[Fetch]], fetcher: Fetcher) -> None:
        try:
            fetcher.fetch([job for places in claimed for job in jobs_of(places)])
        finally:
            self.presence.failed(claimed)

    def _page_jobs(self, places: Places, *, charged: bool) -> Iterator[Fetch]:
        for suffix in ("beton", "rows"):
            sparse.create(self._path(places.shard, suffix), self.sizes[self._index.shard_name(places.shard, suffix)])
        if charged:
            self.room.take(None, PAGE * len(places.numbers))
        name = self._index.shard_name(places.shard, "rows")
        starts = places.numbers * PAGE
        yield from self._jobs(name, places, starts, np.minimum(starts + PAGE, self.sizes[name]), max_gap=0)

    def _sample_jobs(self, places: Places) -> Iterator[Fetch]:
        shard, rows = places.shard, places.numbers
        starts, stops = self._spans(shard, rows)
        blocks = self.blocks.of_ids(self.first_id[shard] + rows)
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(blocks)) + 1):
            found = list(
                self._jobs(
                    self._index.shard_name(shard, "beton"),
                    places._replace(numbers=rows[part]),
                    starts[part],
                    stops[part],
                    max_gap=MAX_GAP,
                )
            )
            ranges = np.array([(job.start, job.stop) for job in found])
            self.room.take(int(blocks[part[0]]), on_disk(ranges[:, 0], ranges[:, 1]))
            yield from found

    def _jobs(self, name: str, places: Places, starts: Ids, stops: Ids, max_gap: int) -> Iterator[Fetch]:
        for start, stop, first, last in requests(starts, stops, max_gap=max_gap, max_bytes=REQUEST_BYTES):
            arrived = places._replace(numbers=places.numbers[first:last])
            yield Fetch(name, start, stop, partial(self.presence.arrived, arrived))

    def _spans(self, shard: int, rows: Ids) -> tuple[Ids, Ids]:
        opened, info = self._open_shard(shard), self._index.tokenizer
        starts, stops, possible = spans_of(opened.records(rows), 4 * info.context_length if info else 0)
        if possible < len(rows):
            raise opened.damaged(int(rows[possible]), "has a picture and tokens too far apart")
        return starts, stops

    def all_came(self, shard: int) -> None:
        """Record that every byte of a shard's files is cached."""
        with self.lock:
            self.presence.of(shard, "samples")[:] = self.presence.of(shard, "pages")[:] = HERE

    def drop_all(self, shard: int) -> None:
        """Free a shard's samples, none of which may be in use."""
        path = self._path(shard, "beton")
        with self.lock:
            self.presence.of(shard, "samples")[:] = ABSENT
            self.presence.forget_if_empty(shard)
            sparse.drop(path, 0, -(-self.sizes[path.name] // PAGE) * PAGE)

    def _drop(self, block: int) -> None:
        """Free a block's pages, except pages shared with a sample of another block. Called under the lock."""
        low, high = self.blocks.starts[block : block + 2].tolist()
        for shard in range(*(np.searchsorted(self.first_id, [low, high - 1], side="right") - [1, 0]).tolist()):
            first = max(0, low - int(self.first_id[shard]))
            last = min(high, int(self.first_id[shard + 1])) - int(self.first_id[shard])
            states = self.presence.of(shard, "samples")
            if not len(here := first + np.flatnonzero(states[first:last])):
                continue
            near = max(0, first - _NEAR)
            before, after = (
                near + np.flatnonzero(states[near:first]),
                last + np.flatnonzero(states[last : last + _NEAR]),
            )
            starts, stops = self._spans(shard, np.concatenate([before, here, after]))
            ours = slice(len(before), len(before) + len(here))
            end_before = int(stops[: ours.start].max(initial=0))
            start_after = int(starts[ours.stop :].min(initial=1 << 62))
            span = int(starts[ours].min()), int(stops[ours].max())
            sparse.drop(self._path(shard, "beton"), *pages_within(*span, end_before, start_after))
            states[first:last] = ABSENT
            self.presence.forget_if_empty(shard)

    def _path(self, shard: int, suffix: ShardSuffix) -> Path:
        return self._folder() / self._index.shard_name(shard, suffix)

    def _rows_of(self, shard: int) -> int:
        return int(self.first_id[shard + 1] - self.first_id[shard])

    def _refuse_if_ended(self) -> None:
        if (error := self.failure) is not None:
            known = isinstance(error, OSError | DatasetError)
            raise (type(error)(*error.args) if known else RuntimeError(str(error))) from error
