"""The samples of a dataset in an object store, or their pictures, in a cache that fills on demand."""

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from threading import Condition, RLock
from typing import Any, TypeAlias, cast

import numpy as np

from ...storage.arrays import Bools, Int64s
from ...storage.bucket import Address
from ...storage.files import RegularFile, open_own, user_cache
from ...storage.lock import own_folder
from ..dataset.files import DatasetFiles, Hold, TarFiles
from ..dataset.index import MAX_TAR_BYTES, SHARD_FOLDER, DatasetIndex
from ..dataset.shard import OpenFiles, Shard
from ..dataset.stored_sample import Located
from ..errors import DatasetError
from .fetching import Fetch, Fetcher, WaitClock, write
from .plan import MAX_GAP, MAX_TAR_GAP, PAGE, grouped, pages_of_rows, requests, runs
from .room import Room
from .schedule import Blocks, Schedule

DEFAULT_BYTES = 1 << 30
"""Disk space for samples read without an order; samples in use at once may take more."""
REQUEST_BYTES = 8 << 20
BLOCKS = "blocks"
"""Folder of the cache."""
_OFFSET_BITS = MAX_TAR_BYTES.bit_length()
"""Bits of an offset in an object. A position has the tar's number, or ~ the shard's, in the bits above."""
ABSENT, COMING = -2, -1
_LAST = np.array([np.iinfo(np.int64).max])  # so that a search always ends at a key


class Contents:
    """What the cache has of a block, by id, or of a shard's records, by page, and where. Not thread-safe."""

    def __init__(self, number: int, file: int = 0) -> None:
        """number: the block's, or the shard's. file: number of the block's file, never used again."""
        self.number, self.file = number, file
        self._keys, self._at = _LAST, np.array([ABSENT])

    def find(self, keys: Int64s) -> Int64s:
        """Return the offset of each key, int64 [k]; ABSENT, or COMING while somebody fetches it."""
        places = np.searchsorted(self._keys, keys)
        return np.where(self._keys[places] == keys, self._at[places], ABSENT)

    def claim(self, keys: Int64s) -> None:
        """Add absent keys, int64 [k], ascending, as COMING."""
        places = np.searchsorted(self._keys, keys)
        self._keys, self._at = np.insert(self._keys, places, keys), np.insert(self._at, places, COMING)

    def put(self, keys: Int64s, at: Int64s | int) -> None:
        """Record the offsets of claimed keys."""
        self._at[np.searchsorted(self._keys, keys)] = at

    def release(self, keys: Int64s) -> None:
        """Remove those keys that are still COMING."""
        places = np.searchsorted(self._keys, keys)
        gone = places[self._at[places] == COMING]
        if len(gone):
            self._keys, self._at = np.delete(self._keys, gone), np.delete(self._at, gone)


_Parts: TypeAlias = list[tuple[Contents, Int64s]]
"""Samples of blocks, by id, or pages of shards' records, by number, ascending."""
_Jobs: TypeAlias = tuple[list[Fetch], list[Int64s]]
"""Requests, and where each part will be."""
_JobsOf: TypeAlias = Callable[[_Parts], _Jobs]


def cache_root() -> Path:
    """Return the folder of all caches, one for each process: $THERMOPILE_CACHE, else the user's usual cache folder."""
    return Path(os.environ.get("THERMOPILE_CACHE") or user_cache())


class CachedSamples(DatasetFiles):
    """Fetches samples into files of blocks, and drops them by blocks. Records stay, 64 bytes a sample. Thread-safe.

    The files are in this object's own cache folder, which is removed with it. Nothing outlives the process: it reads
    only bytes that it fetched itself.
    """

    def __init__(
        self,
        folder: Path,
        index: DatasetIndex,
        tars: TarFiles | None,
        open_shard: Callable[[int], Shard],
        shards: Address | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """folder: of what is not fetched. tars: None if they are on disk, or there are none.

        open_shard: returns a shard whose records' header is cached. shards: address of the files named in `sizes` with
        their bytes; None, and no sizes, if they are on disk.
        """
        super().__init__(folder)
        self._shards, self._tars, self.sizes = shards, tars, sizes or {}
        self._index, self._open_shard = index, open_shard
        self._tokens_bytes = 4 * index.tokenizer.context_length if index.tokenizer else 0
        self.first_id = np.array(index.first_id, np.int64)
        self.on_disk = range(0)
        """Ids of a shard whose .beton is on disk as a whole."""
        self.clock = WaitClock()
        self.lock = RLock()
        self._changed = Condition(self.lock)
        self._files = count()
        self._contents: dict[int, Contents] = {}
        self._records: dict[int, Contents] = {}
        self._opened = OpenFiles(lambda file: RegularFile(self._path(file), os.O_NOFOLLOW))
        self.blocks = Blocks.without_order(index.n)
        self.room = Room(self.lock, DEFAULT_BYTES, self._drop)
        self.failure: BaseException | None = None
        """The error that ended read-ahead."""

    @cached_property
    def _fetcher(self) -> Fetcher:
        return Fetcher("fetch")

    @cached_property
    def cache(self) -> Path:
        """The cache's folder, which is made when it is needed."""
        with self.lock:
            if (made := self.__dict__.get("cache")) is not None:  # another thread made it meanwhile
                return Path(made)
            open_folder = ExitStack()
            folder = open_folder.enter_context(own_folder(cache_root(), "dataset-"))
            weakref.finalize(self, open_folder.close)
            (folder / SHARD_FOLDER).mkdir()
            (folder / BLOCKS).mkdir()
            return folder

    def follow(self, blocks: Blocks, limit: int, schedule: Schedule) -> None:
        """From now on, keep these blocks within `limit` bytes, and drop first the block that the schedule needs last.

        Raises RuntimeError if samples have been read.
        """
        if self.room.bytes:
            raise RuntimeError("samples have been read already; announce the windows first")
        self.blocks, self.room = blocks, Room(self.lock, limit, self._drop, schedule)

    def hold(self, ids: Int64s) -> Hold:
        """Fetch the samples, int64 [b] within the dataset, and keep them until the result is released.

        Raises DatasetError for a damaged record, CacheTooSmallError, OSError including ObjectStoreError.
        """
        ids = np.unique(ids)
        blocks = tuple(np.unique(self.blocks.of_ids(ids)).tolist())
        self.room.enter(blocks)
        held = Hold(partial(self.room.leave, blocks), partial(self.room.leave_later, blocks))
        try:
            if self._are_missing(samples := self._in_blocks(ids)):
                with self.clock.waiting():
                    self.bring_records_of(ids)
                    self._complete(samples, self._sample_jobs)
        except BaseException:
            held.release()
            raise
        return held

    def placed(self, located: Located, ids: Int64s, tokens_of: Int64s) -> Located:
        """Return `located` with the places in the cache of held samples' pictures, and of these or others' tokens.

        ids, tokens_of: int64 [b]. What is on disk stays where it is.
        """
        (files, token_files), (ends, tokens_at) = self._find(np.stack([ids, tokens_of]))
        pictures, tokens = self._are_fetched(ids, located.jpeg_files), self._are_fetched(tokens_of, located.files)
        return located._replace(
            jpeg_files=np.where(pictures, files, located.jpeg_files),
            jpeg_at=np.where(pictures, (ends - located.jpeg_bytes).astype(np.uint64), located.jpeg_at),
            files=np.where(tokens, token_files, located.files),
            tokens_at=np.where(tokens, tokens_at.astype(np.uint64), located.tokens_at),
        )

    def opened(self, place: int) -> RegularFile:
        """Return the file of a place from `placed`, for `pread`, open as long as the caller keeps it."""
        return self._opened[-2 - place]

    def prepare(self, shard: int) -> None:
        if self._shards is not None:
            self._complete([(self._records_of(shard), np.zeros(1, np.int64))], self._page_jobs)

    def bring_records(self, shard: int) -> None:
        self.bring_records_of(np.arange(*self.first_id[shard : shard + 2]))

    def bring_records_of(self, ids: Int64s) -> None:
        """Fetch the records of samples, int64 [b], with the headers of their shards."""
        self._complete(self._in_pages(ids), self._page_jobs)

    def records_came(self, shard: int) -> None:
        """Note that a shard's file of records is on disk as a whole."""
        contents, pages = self._records_of(shard), pages_of_rows(np.arange(*self.first_id[shard : shard + 2]))
        with self.lock:
            contents.claim(missing := pages[contents.find(pages) == ABSENT])
            contents.put(missing, 0)

    def seconds_waited(self) -> float:
        return self.clock.seconds()

    def beton_bytes(self) -> Int64s:
        """Return the bytes of each shard's samples, int64 [shards]; in tars, a mean share of them."""
        rows, size = np.diff(self.first_id), np.zeros(len(self.first_id) - 1, np.int64)
        if self._shards is not None:
            size += [self.sizes[self._index.shard_name(shard, "beton")] for shard in range(len(rows))]
        return size + rows * (sum(self._tars.sizes) // self._index.n) if self._tars else size

    def bring_ahead(self, ids: Int64s, fetcher: Fetcher) -> None:
        """Fetch samples for which the caller has taken room, except samples that others are fetching.

        The others may be waiting for the caller's room.
        """
        self._fetch(self._claim(self._in_blocks(ids), wait=False), self._sample_jobs, fetcher)

    def bring_records_ahead(self, ids: Int64s, first_step: int, fetcher: Fetcher, ended: Callable[[], bool]) -> None:
        """Fetch records of samples that a window from `first_step` on needs, as soon as there is room for them.

        ended: asked before each look for room; ends the wait by a RuntimeError.
        """
        pages = self._in_pages(ids)
        while claimed := self._claim_ahead(pages, first_step, ended):
            self._fetch(claimed, partial(self._page_jobs, paid=True), fetcher)

    def size_of(self, ids: Int64s) -> int:
        """Return the bytes that samples take in their block's file; their records are cached already.

        Raises DatasetError for a damaged record.
        """
        return int(self._sources(ids)[1].sum())

    def notify_all(self) -> None:
        """Wake all callers who wait for samples or for room."""
        with self.lock:
            self._changed.notify_all()
            self.room.changed.notify_all()

    # Claims: each part is fetched by the first who needs it.

    def _in_blocks(self, ids: Int64s) -> _Parts:
        """Return samples, int64 [b], of blocks that the caller has entered."""
        ids = np.unique(ids)
        with self.lock:
            return [(self._block(block), ids[places]) for block, places in grouped(self.blocks.of_ids(ids))]

    def _block(self, number: int) -> Contents:
        if number not in self._contents:
            contents = Contents(number, next(self._files))
            _make(self._path(contents.file), 0)
            self._contents[number] = contents
        return self._contents[number]

    def _in_pages(self, ids: Int64s) -> _Parts:
        return [
            (self._records_of(shard), pages_of_rows(ids[places] - self.first_id[shard]))
            for shard, places in grouped(self._shards_of(ids))
            if self._shards is not None
        ]

    def _records_of(self, shard: int) -> Contents:
        with self.lock:
            return self._records.setdefault(shard, Contents(shard))

    def _are_missing(self, wanted: _Parts) -> bool:
        with self.lock:
            return any((contents.find(keys) < 0).any() for contents, keys in wanted)

    def _complete(self, wanted: _Parts, jobs_of: _JobsOf) -> None:
        """Fetch missing parts, and wait for parts that others are fetching."""
        while claimed := self._claim(wanted):
            self._fetch(claimed, jobs_of, self._fetcher)

    def _claim(self, wanted: _Parts, *, wait: bool = True) -> _Parts:
        """Return the parts that the caller must fetch, now marked COMING; none once all are cached.

        Waits for other callers that fetch the rest, unless `wait` is false.
        """
        with self.lock:
            while self._are_missing(wanted):
                if (error := self.failure) is not None:
                    known = isinstance(error, OSError | DatasetError)
                    raise (type(error)(*error.args) if known else RuntimeError(str(error))) from error
                absent = ((contents, keys[contents.find(keys) == ABSENT]) for contents, keys in wanted)
                claimed = [(contents, keys) for contents, keys in absent if len(keys)]
                for contents, keys in claimed:
                    contents.claim(keys)
                if claimed or not wait:
                    return claimed
                self._changed.wait()
            return []

    def _claim_ahead(self, pages: _Parts, first_step: int, ended: Callable[[], bool]) -> _Parts:
        """Claim pages once there is room. Until then callers, who may hold the room, need not wait for these pages."""
        with self.lock:
            while not ended():
                claimed = self._claim(pages)
                size = PAGE * sum(len(numbers) for _, numbers in claimed)
                if self.room.take_ahead(None, size, first_step):
                    return claimed
                self._release(claimed)
                self.room.changed.wait()
        raise RuntimeError("the reading ahead has ended")

    def _release(self, claimed: _Parts) -> None:
        """Leave claimed parts that have not come to others."""
        with self.lock:
            for contents, keys in claimed:
                contents.release(keys)
            self._changed.notify_all()

    def _fetch(self, claimed: _Parts, jobs_of: _JobsOf, fetcher: Fetcher) -> None:
        try:
            jobs, places = jobs_of(claimed) if claimed else ([], [])
            fetcher.fetch(jobs)
            with self.lock:
                for (contents, keys), at in zip(claimed, places, strict=True):
                    contents.put(keys, at)
        finally:
            self._release(claimed)

    # Requests.

    def _page_jobs(self, claimed: _Parts, *, paid: bool = False) -> _Jobs:
        jobs, shards = list[Fetch](), cast(Address, self._shards)
        for contents, pages in claimed:
            name = self._index.shard_name(contents.number, "rows")
            path, size = self.cache / SHARD_FOLDER / name, self.sizes[name]
            _make(path, size)
            if not paid:
                self.room.take(None, PAGE * len(pages))
            spans = pages * PAGE, np.minimum(pages * PAGE + PAGE, size)
            for start, stop, _, _ in requests(*spans, max_gap=0, max_bytes=REQUEST_BYTES):
                jobs.append(Fetch(shards / name, "", start, stop, partial(write, path, [(start, 0, stop - start)])))
        return jobs, [np.zeros(len(pages), np.int64) for _, pages in claimed]

    def _sample_jobs(self, claimed: _Parts) -> _Jobs:
        """Return requests for samples of any blocks, by their places in .betons and tars."""
        counts = [len(keys) for _, keys in claimed]
        positions, sizes = self._sources(np.concatenate([keys for _, keys in claimed]))
        ends = [
            self.room.take(contents.number, int(of_block.sum())) + np.cumsum(of_block.sum(axis=0)) - of_block[1]
            for (contents, _), of_block in zip(claimed, np.split(sizes, np.cumsum(counts)[:-1], axis=1), strict=True)
        ]
        files = np.tile(np.repeat([contents.file for contents, _ in claimed], counts), 2)
        targets = np.stack([np.concatenate(ends) - sizes[0], np.concatenate(ends)])
        order = np.argsort(positions, axis=None, kind="stable")
        order = order[sizes.ravel()[order] > 0]
        starts, stops, files, at = (each.ravel()[order] for each in (positions, positions + sizes, files, targets))
        gaps, jobs = np.where(starts[1:] < 0, MAX_GAP, MAX_TAR_GAP), list[Fetch]()
        for start, stop, first, last in requests(starts, stops, max_gap=gaps, max_bytes=REQUEST_BYTES):
            parts = slice(first, last)
            store = partial(self._write, files[parts], at[parts], starts[parts] - start, stops[parts] - start)
            low = start & ((1 << _OFFSET_BITS) - 1)
            jobs.append(Fetch(*self._object(start >> _OFFSET_BITS), low, low + stop - start, store))
        return jobs, ends

    def _sources(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return the positions of samples' pictures and tokens (see _OFFSET_BITS), and their bytes: int64 [2, k] each.

        What is on disk has 0 bytes. Raises DatasetError for a damaged record.
        """
        objects, starts, sizes = np.zeros((3, 2, len(ids)), np.int64)
        for shard, places in grouped(self._shards_of(ids)):
            records, tars = self._open_shard(shard).resolved(ids[places] - self.first_id[shard])
            objects[:, places] = np.where(tars < 0, ~shard, tars), np.full(len(tars), ~shard)
            starts[:, places] = records["jpeg_at"], records["tokens_at"]
            sizes[:, places] = records["jpeg_bytes"], self._tokens_bytes * records["captions"].astype(np.int64)
        return (objects << _OFFSET_BITS) + starts, sizes * self._are_fetched(ids, objects)

    def _are_fetched(self, ids: Int64s, objects: Int64s) -> Bools:
        """Return which pictures or tokens are fetched; objects: their tars, or negative in a .beton, int64 [..., b]."""
        of_shards = (ids < self.on_disk.start) | (ids >= self.on_disk.stop)
        return np.where(objects < 0, of_shards & (self._shards is not None), self._tars is not None)

    def _object(self, number: int) -> tuple[Address, str]:
        """Return a tar by its number, or the .beton of shard ~number, with the ETag that it must have."""
        if number < 0:
            return cast(Address, self._shards) / self._index.shard_name(~number, "beton"), ""
        tars: Any = self._tars
        return tars.root / tars.names[number], tars.versions[number]

    def _write(self, files: Int64s, at: Int64s, starts: Int64s, stops: Int64s, data: bytes) -> None:
        """Write parts of an answer to blocks: file, offset in it, start and end in the answer, int64 [k] each."""
        apart = (files[1:] != files[:-1]) | (starts[1:] != stops[:-1]) | (np.diff(at) != np.diff(starts))
        pieces = [(files[low], (int(at[low]), starts[low], stops[high - 1])) for low, high in runs(apart, len(files))]
        for file, of_file in groupby(pieces, itemgetter(0)):
            write(self._path(int(file)), [piece for _, piece in of_file], data)

    # Places in the cache.

    def _path(self, file: int) -> Path:
        return self.cache / BLOCKS / str(file)

    def _find(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return the place of each sample's file, -1 if there is none, and where its picture ends and tokens begin."""
        files, ends = np.full((2, ids.size), -1)
        with self.lock:
            for block, places in grouped(self.blocks.of_ids(ids.ravel())):
                if (contents := self._contents.get(block)) is not None:
                    files[places], ends[places] = -2 - contents.file, contents.find(ids.ravel()[places])
        return files.reshape(ids.shape), ends.reshape(ids.shape)

    def _drop(self, block: int) -> None:
        """Delete a block's file. Called under the lock."""
        if (contents := self._contents.pop(block, None)) is not None:
            self._opened.forget(contents.file)
            self._path(contents.file).unlink(missing_ok=True)

    def _shards_of(self, ids: Int64s) -> Int64s:
        return np.searchsorted(self.first_id, ids, side="right") - 1


def _make(path: Path, size: int) -> None:
    """Create a file unless it exists, and give it its size."""
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT)
    os.ftruncate(descriptor, size)
    os.close(descriptor)
