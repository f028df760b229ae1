"""The samples of a dataset in an object store, or their pictures, in a cache that fills on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...storage.bucket import Address
from ..dataset.files import Held
from ..dataset.index import MAX_TAR_BYTES, SHARD_FOLDER, DatasetIndex, ShardSuffix
from ..dataset.tar_files import TarFiles
from ..errors import DatasetError
from . import sparse
from .blocks import Blocks
from .fetching import CachedFile, Fetch, Fetcher, WaitClock
from .pages import Pages
from .plan import MAX_GAP, MAX_TAR_GAP, PAGE, Ids, on_disk, pages_of_rows, requests, spans_of
from .presence import ABSENT, HERE, WHOLE, Kind, Places, Presence
from .room import Room
from .schedule import Schedule

if TYPE_CHECKING:
    from ..dataset.shard import Shard

DEFAULT_BYTES = 1 << 30
"""Disk space for samples read without an order; samples in use at once may take more."""
REQUEST_BYTES = 8 << 20
TARS = "tars"
"""Folder of the cache."""
_OFFSET_BITS = MAX_TAR_BYTES.bit_length()
"""Bits of an offset in a file. A position has the number of its file (`_file`) in the bits above."""
_OFFSET = (1 << _OFFSET_BITS) - 1
_Jobs: TypeAlias = Callable[[list[Places]], Iterable[Fetch]]


class CachedSamples:
    """Fetches samples into sparse files, and drops them by blocks. Records stay, 64 bytes a sample. Thread-safe."""

    def __init__(
        self,
        shards: Address | None,
        tars: TarFiles | None,
        folder: Callable[[], Path],
        index: DatasetIndex,
        sizes: Mapping[str, int],
        open_shard: Callable[[int], Shard],
    ) -> None:
        """shards: address of the files named in `sizes` with their bytes; None, and no sizes, if they are on disk.

        tars: None if they are on disk, or there are none. folder: the cache's, which is made when needed.
        open_shard: returns a shard whose files exist.
        """
        self._shards, self._tars, self.sizes = shards, tars, sizes
        self._folder, self._index, self._open_shard = folder, index, open_shard
        fetched: dict[Kind, object] = {"samples": shards, "pictures": tars}
        self._kinds = [kind for kind, place in fetched.items() if place is not None]
        self.first_id = np.array(index.first_id, np.int64)
        self.clock = WaitClock()
        self.lock = RLock()
        self.pages = Pages(self.lock)
        self.presence = Presence(self.lock, self._rows_of)
        self.blocks = Blocks.without_order(index.n)
        self.room = Room(self.lock, DEFAULT_BYTES, self._drop)
        self.failure: BaseException | None = None
        """The error that ended read-ahead."""

    @cached_property
    def _fetcher(self) -> Fetcher:
        return Fetcher(self.pages, "fetch")

    def new_fetcher(self) -> Fetcher:
        """Return separate threads for a caller, so that nobody queues behind it."""
        return Fetcher(self.pages, "read-ahead")

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

    def shard_bytes(self) -> Ids:
        """Return the bytes of each shard's samples, int64 [shards]; in tars, a mean share and a page a sample."""
        rows, size = np.diff(self.first_id), np.zeros(len(self.first_id) - 1, np.int64)
        if self._shards is not None:
            size += [self.sizes[self._index.shard_name(shard, "beton")] for shard in range(len(rows))]
        return size + rows * (sum(self._tars.sizes) // self._index.n + PAGE) if self._tars else size

    def bring_ahead(self, ids: Ids, fetcher: Fetcher) -> None:
        """Fetch samples for which the caller has taken room, except samples that others are fetching.

        The others may be waiting for the caller's room.
        """
        claimed = self.presence.claim(self._parts_of(self._by_shard(ids)), self._refuse_if_ended, wait=False)
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
        spans = [self._spans(places) for places in self._parts_of(self._by_shard(ids))]
        return on_disk(*map(np.concatenate, zip(*spans, strict=True))) if spans else 0  # a block of holes

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
        samples = self._parts_of(by_shard)
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
        return [Places(shard, "pages", pages_of_rows(rows)) for shard, rows in by_shard if self._shards is not None]

    def _parts_of(self, by_shard: list[tuple[int, Ids]]) -> list[Places]:
        return [Places(shard, kind, rows) for shard, rows in by_shard for kind in self._kinds]

    def _complete(self, wanted: list[Places], jobs_of: _Jobs) -> None:
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

    def _fetch(self, claimed: list[Places], jobs_of: _Jobs, fetcher: Fetcher) -> None:
        try:
            fetcher.fetch([*jobs_of(claimed)] if claimed else [])
        finally:
            self.presence.failed(claimed)

    def _page_jobs(self, claimed: list[Places], *, charged: bool) -> Iterator[Fetch]:
        for places in claimed:
            file = self._shard_file(places.shard, "rows")
            for each in (self._shard_file(places.shard, "beton"), file):
                sparse.create(each.path, each.size)
            if charged:
                self.room.take(None, PAGE * len(places.numbers))
            starts = places.numbers * PAGE
            stops = np.minimum(starts + PAGE, file.size)
            for _, _, first, last in requests(starts, stops, max_gap=0, max_bytes=REQUEST_BYTES):
                arrived = partial(self.presence.arrived, places._replace(numbers=places.numbers[first:last]))
                yield Fetch(file, starts[first:last], stops[first:last], arrived)

    def _sample_jobs(self, claimed: list[Places]) -> Iterator[Fetch]:
        """Yield requests for parts of samples, of any shards, by their places in their files."""
        spans = [self._spans(places) for places in claimed]
        for places, span in zip(claimed, spans, strict=True):
            self._take_room(places, *span)
        owners = np.repeat(np.arange(len(claimed)), [len(places.numbers) for places in claimed])
        numbers = np.concatenate([places.numbers for places in claimed])
        starts, stops = map(np.concatenate, zip(*spans, strict=True))

        def arrived(parts: Ids) -> None:
            for owner in np.unique(owners[parts]).tolist():
                of_owner = numbers[parts[owners[parts] == owner]]
                self.presence.arrived(claimed[owner]._replace(numbers=of_owner))

        arrived(np.flatnonzero(starts == stops))
        order = np.argsort(starts, kind="stable")
        order = order[stops[order] > starts[order]]
        gaps = np.where(starts[order][1:] < 0, MAX_GAP, MAX_TAR_GAP)
        for start, _, first, last in requests(starts[order], stops[order], max_gap=gaps, max_bytes=REQUEST_BYTES):
            file, parts = self._file(start >> _OFFSET_BITS), order[first:last]
            sparse.create(file.path, file.size)
            yield Fetch(file, starts[parts] & _OFFSET, stops[parts] & _OFFSET, partial(arrived, parts))

    def _take_room(self, places: Places, starts: Ids, stops: Ids) -> None:
        blocks = self.blocks.of_ids(self.first_id[places.shard] + places.numbers)
        for part in np.split(np.arange(len(blocks)), np.flatnonzero(np.diff(blocks)) + 1):
            self.room.take(int(blocks[part[0]]), on_disk(starts[part], stops[part]))

    def _spans(self, places: Places) -> tuple[Ids, Ids]:
        """Return first and last position, exclusive, of parts of samples, int64 [k] each; see `_file`."""
        shard, kind, rows = places
        opened, info = self._open_shard(shard), self._index.tokenizer
        records, tars = opened.resolved(rows)
        if kind == "pictures":
            starts = (tars << _OFFSET_BITS) + records["jpeg_at"].astype(np.int64)
            return starts, starts + np.where(tars < 0, 0, records["jpeg_bytes"])
        starts, stops, possible = spans_of(records, tars, 4 * info.context_length if info else 0)
        if possible < len(rows):
            raise opened.damaged(int(rows[possible]), "has a picture and tokens too far apart")
        return starts + (~shard << _OFFSET_BITS), stops + (~shard << _OFFSET_BITS)

    def _file(self, number: int) -> CachedFile:
        """Return a tar by its number, or the .beton of shard ~number."""
        return self.tar(number) if number >= 0 else self._shard_file(~number, "beton")

    def tar(self, number: int) -> CachedFile:
        tars: Any = self._tars  # only called if these are at an address
        path = self._folder() / TARS / f"{number}.tar"
        return CachedFile(tars.root / tars.names[number], path, tars.sizes[number], tars.versions[number])

    def _shard_file(self, shard: int, suffix: ShardSuffix) -> CachedFile:
        shards: Any = self._shards  # likewise
        name = self._index.shard_name(shard, suffix)
        return CachedFile(shards / name, self._folder() / SHARD_FOLDER / name, self.sizes[name])

    def all_came(self, shard: int) -> None:
        """Record that every byte of a shard's files is cached."""
        with self.lock:
            self.presence.of(shard, "samples")[:] = self.presence.of(shard, "pages")[:] = WHOLE

    def drop_all(self, shard: int) -> None:
        """Free a shard's samples, none of which may be in use."""
        file = self._shard_file(shard, "beton")
        with self.lock:
            self.presence.of(shard, "samples")[:] = ABSENT
            self.presence.forget_if_empty(shard, "samples")
            self.pages.forget(file.path, file.size)

    def _drop(self, block: int) -> None:
        """Free a block's pages, except pages shared with a sample of another block. Called under the lock."""
        low, high = self.blocks.starts[block : block + 2].tolist()
        for places in self._parts_of(self._by_shard(np.arange(low, high))):
            shard, kind, rows = places
            states = self.presence.of(shard, kind)
            if not len(here := rows[states[rows] == HERE]):
                continue
            starts, stops = self._spans(places._replace(numbers=here))
            files = starts >> _OFFSET_BITS
            for number in np.unique(files[stops > starts]).tolist():
                of_file = files == number
                self.pages.free(self._file(number).path, starts[of_file] & _OFFSET, stops[of_file] & _OFFSET)
            states[here] = ABSENT
            self.presence.forget_if_empty(shard, kind)

    def _rows_of(self, shard: int) -> int:
        return int(self.first_id[shard + 1] - self.first_id[shard])

    def _refuse_if_ended(self) -> None:
        if (error := self.failure) is not None:
            known = isinstance(error, OSError | DatasetError)
            raise (type(error)(*error.args) if known else RuntimeError(str(error))) from error
