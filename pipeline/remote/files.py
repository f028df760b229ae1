"""The files of a dataset in an object store, as a folder of sparse files that are filled as samples are asked for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...files import written_aside
from ...objects import Address
from ..dataset_files import Held
from ..dataset_index import SHARD_FOLDER, SHARD_SUFFIXES, DatasetIndex, ShardSuffix, shard_name
from ..order import Order, Selected, Window
from . import sparse
from .blocks import Blocks
from .cache_folder import CacheFolder
from .fetching import Fetcher, Job, WaitClock
from .plan import MAX_GAP, PAGE, Ids, on_disk, pages_of_rows, pages_within, requests, spans_of
from .presence import ABSENT, HERE, Places, Presence
from .read_ahead import ReadAhead
from .room import Room
from .schedule import Schedule

if TYPE_CHECKING:
    from ..shard import Shard

DEFAULT_BYTES = 1 << 30
"""Disk for samples that are read without an order; what is in use at once may take more."""
REQUEST_BYTES = 8 << 20
_MAX_SCHEDULED = 1 << 17
_NEAR = 64
"""Rows beside a block that may share a page with it: a picture has more than 64 bytes."""


class RemoteFiles:
    """A dataset's files at an address, in a cache folder of this object's own, which goes with it.

    Nothing outlives the process: what is read was fetched by it. Records stay once they are there, 64 bytes a sample;
    samples are dropped by blocks. Thread-safe.
    """

    def __init__(self, address: Address, index: DatasetIndex, open_shard: Callable[[int], Shard]) -> None:
        """open_shard: returns a shard whose files this object has created."""
        self.address, self._index, self._open_shard = address, index, open_shard
        self._first_id = np.array(index.first_id, np.int64)
        self.sizes = dict((address / SHARD_FOLDER).objects())
        """Bytes of each file of the shards."""
        self._clock = WaitClock()
        self._presence = Presence(lambda shard: int(self._first_id[shard + 1] - self._first_id[shard]))
        self.changed = self._presence.changed
        self.blocks = Blocks.without_order(index.n)
        touches, self._touched = count(1), dict[int, int]()
        self._touch = lambda block: self._touched.__setitem__(block, next(touches))
        self.room = Room(self.changed, DEFAULT_BYTES, lambda block: -self._touched.get(block, 0), self._drop, firm=False)
        self._ahead: ReadAhead | None = None
        self._whole = threading.Lock()

    @cached_property
    def folder(self) -> Path:
        """The cache."""
        with self.changed:
            if (made := self.__dict__.get("folder")) is not None:  # by another thread meanwhile
                return Path(made)
            folder = CacheFolder()
            weakref.finalize(self, folder.remove)
            (folder.path / SHARD_FOLDER).mkdir()
            return folder.path

    @cached_property
    def _fetcher(self) -> Fetcher:
        return Fetcher(self.address / SHARD_FOLDER, self.folder / SHARD_FOLDER, "fetch")

    def names(self) -> Iterable[str]:
        """Return the names of the shards' files."""
        return self.sizes

    def whole(self, name: str) -> Path:
        """Return the path of a small file, or of a table, fetched whole at its first use. Raises OSError."""
        path = self.folder / name
        with self._whole:
            if not path.exists():
                with written_aside(path) as file, self._clock.waiting():
                    (self.address / name).download(file)
        return path

    def prepare(self, shard: int) -> None:
        """Create a shard's files, if they are not there, with the header of its records."""
        self._bring_records([(shard, np.zeros(0, np.int64))])

    def bring_records(self, shard: int) -> None:
        """Fetch all records of a shard."""
        self._bring_records([(shard, np.arange(self._first_id[shard + 1] - self._first_id[shard]))])

    def hold(self, ids: Ids) -> Held:
        """Fetch the samples, int64 [b] within the dataset, and keep them until the result is released.

        Raises DatasetError for a damaged record and CacheTooSmallError; OSError, ObjectStoreError among them.
        """
        blocks = tuple(np.unique(self.blocks.of_ids(ids)).tolist())
        for block in blocks:
            self._touch(block)
        self.room.enter(blocks)
        held = Held(partial(self.room.leave, blocks), partial(self.room.leave_later, blocks))
        try:
            self._bring(self._by_shard(ids))
        except BaseException:
            held.release()
            raise
        return held

    @contextmanager
    def expect(self, windows: Iterable[Window], order: Order | Selected, limit: int) -> Iterator[None]:
        """Read ahead, until the block ends, what windows need: within `limit` bytes on disk, which nothing exceeds.

        windows: of this process, of all steps to come, counted over all epochs. Call it before any sample is read.
        """
        if self.room.bytes:
            raise RuntimeError("samples have been read already; announce the windows first")
        self.blocks = Blocks.of(order)
        schedule = Schedule(windows, min(len(self.blocks), _MAX_SCHEDULED))
        self.room = Room(self.changed, limit, schedule.next_use, self._drop, firm=True)
        self._ahead = ReadAhead(self, schedule)
        try:
            yield
        finally:
            self._ahead.close()

    def finished(self, step: int) -> None:
        """Record that the samples of all steps up to this one have been read."""
        if self._ahead is not None:
            self._ahead.finished(step)

    def seconds_waited(self) -> float:
        """Return the seconds in which someone waited for samples to be fetched."""
        return self._clock.seconds()

    @contextmanager
    def whole_shard(self, shard: int) -> Iterator[None]:
        """Have all bytes of a shard's files while the block runs."""
        self.prepare(shard)
        beton, rows, table = (shard_name(shard, suffix) for suffix in SHARD_SUFFIXES)
        for name in (beton, rows):
            with (self.folder / SHARD_FOLDER / name).open("r+b") as file:
                (self.address / SHARD_FOLDER / name).download(file)
        table_file = self.whole(f"{SHARD_FOLDER}/{table}")
        with self.changed:
            self._presence.of(shard, "samples")[:] = self._presence.of(shard, "pages")[:] = HERE
        try:
            yield
        finally:
            with self.changed:
                self._presence.of(shard, "samples")[:] = ABSENT
                self._presence.forget_if_empty(shard)
                sparse.drop(self._path(shard, "beton"), 0, -(-self.sizes[beton] // PAGE) * PAGE)
            table_file.unlink()

    def beton_bytes(self) -> NDArray[np.int64] | None:
        """Return the sizes of the .beton files, int64 [shards]."""
        return np.array([self.sizes[shard_name(shard, "beton")] for shard in range(len(self._first_id) - 1)], np.int64)

    def bring_ahead(self, ids: Ids, fetcher: Fetcher) -> None:
        """Fetch samples for which the caller has taken room."""
        self._complete([Places(shard, "samples", rows) for shard, rows in self._by_shard(ids)],
                       partial(self._sample_jobs, charged=False), fetcher)  # fmt: skip

    def bring_records_ahead(self, ids: Ids, fetcher: Fetcher) -> None:
        """Fetch samples' records."""
        self._bring_records(self._by_shard(ids), fetcher)

    def size_on_disk(self, ids: Ids) -> int:
        """Return the bytes that a block takes on disk once its samples are there; their records are there already.

        Raises DatasetError for a damaged record.
        """
        spans = [self._spans(shard, rows) for shard, rows in self._by_shard(ids)]
        return sum(on_disk(starts.min(keepdims=True), stops.max(keepdims=True)) for starts, stops in spans)

    def new_fetcher(self) -> Fetcher:
        """Return threads of the caller's own, so that nobody queues behind it."""
        return Fetcher(self.address / SHARD_FOLDER, self.folder / SHARD_FOLDER, "read-ahead")

    def refuse_if_ended(self) -> None:
        """Raise the error that ended the reading ahead."""
        if self._ahead is not None and (error := self._ahead.failure) is not None:
            raise (type(error)(*error.args) if isinstance(error, OSError) else RuntimeError(str(error))) from error

    # What is not there.

    def _by_shard(self, ids: Ids) -> list[tuple[int, Ids]]:
        ids = np.unique(ids)
        shards = np.searchsorted(self._first_id, ids, side="right") - 1
        parts = np.split(ids, np.flatnonzero(np.diff(shards)) + 1) if len(ids) else []
        return [
            (shard := int(np.searchsorted(self._first_id, part[0], side="right") - 1), part - self._first_id[shard])
            for part in parts
        ]

    def _bring(self, by_shard: list[tuple[int, Ids]]) -> None:
        samples = [Places(shard, "samples", rows) for shard, rows in by_shard]
        if self._presence.are_here(samples):
            return
        with self._clock.waiting():
            self._bring_records(by_shard)
            self._complete(samples, partial(self._sample_jobs, charged=True), self._fetcher)

    def _bring_records(self, by_shard: list[tuple[int, Ids]], fetcher: Fetcher | None = None) -> None:
        pages = [Places(shard, "pages", pages_of_rows(rows)) for shard, rows in by_shard]
        if not self._presence.are_here(pages):
            self._complete(pages, self._page_jobs, fetcher or self._fetcher)

    def _complete(
        self, wanted: list[Places], jobs_of: Callable[[Places], Iterable[Job]], fetcher: Fetcher
    ) -> None:  # fmt: skip
        """Fetch what is absent, and wait for what others are fetching."""
        while claimed := self._presence.claim(wanted, self.refuse_if_ended):
            try:
                fetcher.fetch([job for places in claimed for job in jobs_of(places)])
            finally:
                self._presence.failed(claimed)

    def _page_jobs(self, places: Places) -> Iterator[Job]:
        for suffix in ("beton", "rows"):
            sparse.create(self._path(places.shard, suffix), self.sizes[shard_name(places.shard, suffix)])
        self.room.take(None, PAGE * len(places.numbers))
        name = shard_name(places.shard, "rows")
        starts = places.numbers * PAGE
        yield from self._jobs(name, places, starts, np.minimum(starts + PAGE, self.sizes[name]), max_gap=0)

    def _sample_jobs(self, places: Places, *, charged: bool) -> Iterator[Job]:
        shard, rows = places.shard, places.numbers
        starts, stops = self._spans(shard, rows)
        blocks = self.blocks.of_ids(self._first_id[shard] + rows)
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(blocks)) + 1):
            found = list(self._jobs(shard_name(shard, "beton"), places._replace(numbers=rows[part]),
                                    starts[part], stops[part], max_gap=MAX_GAP))  # fmt: skip
            if charged:
                ranges = np.array([(job.start, job.stop) for job in found])
                self.room.take(int(blocks[part[0]]), on_disk(ranges[:, 0], ranges[:, 1]))
            yield from found

    def _jobs(self, name: str, places: Places, starts: Ids, stops: Ids, max_gap: int) -> Iterator[Job]:
        for start, stop, first, last in requests(starts, stops, max_gap=max_gap, max_bytes=REQUEST_BYTES):
            arrived = places._replace(numbers=places.numbers[first:last])
            yield Job(name, start, stop, partial(self._presence.arrived, arrived))

    def _spans(self, shard: int, rows: Ids) -> tuple[Ids, Ids]:
        opened, info = self._open_shard(shard), self._index.tokenizer
        starts, stops, possible = spans_of(opened.records(rows), 4 * info.context_length if info else 0)
        if possible < len(rows):
            raise opened.damaged(int(rows[possible]), "has a picture and tokens too far apart")
        return starts, stops

    def _drop(self, block: int) -> None:
        """Free a block's pages, except those that a sample of another block shares. Called under the lock."""
        low, high = self.blocks.starts[block : block + 2].tolist()
        for shard in range(*(np.searchsorted(self._first_id, [low, high - 1], side="right") - [1, 0]).tolist()):
            first = max(0, low - int(self._first_id[shard]))
            last = min(high, int(self._first_id[shard + 1])) - int(self._first_id[shard])
            states = self._presence.of(shard, "samples")
            if not len(here := first + np.flatnonzero(states[first:last])):
                continue
            near = max(0, first - _NEAR)
            before, after = near + np.flatnonzero(states[near:first]), last + np.flatnonzero(states[last : last + _NEAR])
            starts, stops = self._spans(shard, np.concatenate([before, here, after]))
            ours = slice(len(before), len(before) + len(here))
            end_before = int(stops[: ours.start].max(initial=0))
            start_after = int(starts[ours.stop :].min(initial=1 << 62))
            span = int(starts[ours].min()), int(stops[ours].max())
            sparse.drop(self._path(shard, "beton"), *pages_within(*span, end_before, start_after))
            states[first:last] = ABSENT
            self._presence.forget_if_empty(shard)

    def _path(self, shard: int, suffix: ShardSuffix) -> Path:
        return self.folder / SHARD_FOLDER / shard_name(shard, suffix)
