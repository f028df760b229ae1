"""The files of a dataset in an object store, as a dataset sees them: a folder that fills as it is read."""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...storage.bucket import Address
from ...storage.files import user_cache, written_aside
from ...storage.lock import own_folder
from ..dataset.files import DatasetFiles, Hold, TarFiles
from ..dataset.index import SHARD_FOLDER, SHARD_SUFFIXES, DatasetIndex
from ..dataset.raw_bytes import Descriptor
from ..dataset.shard import Shard
from ..dataset.stored_sample import Located
from ..errors import DatasetError
from ..order.order import Order, Selected, Window
from .plan import Ids
from .read_ahead import ReadAhead
from .samples import BLOCKS, CachedSamples
from .schedule import Blocks, Schedule


def cache_root() -> Path:
    """Return the folder of all caches, one for each process: $THERMOPILE_CACHE, else the user's usual cache folder."""
    return Path(os.environ.get("THERMOPILE_CACHE") or user_cache())


class _Cached(DatasetFiles):
    """What both kinds of files share: samples in this object's own cache folder, which is removed with it.

    Nothing outlives the process: it reads only bytes that it fetched itself. Thread-safe.
    """

    samples: CachedSamples
    _whole: threading.Lock
    _ahead: ReadAhead | None = None

    @cached_property
    def cache(self) -> Path:
        with self._whole:
            if (made := self.__dict__.get("cache")) is not None:  # another thread made it meanwhile
                return Path(made)
            open_folder = ExitStack()
            folder = open_folder.enter_context(own_folder(cache_root(), "dataset-"))
            weakref.finalize(self, open_folder.close)
            (folder / SHARD_FOLDER).mkdir()
            (folder / BLOCKS).mkdir()
            return folder

    def hold(self, ids: Ids) -> Hold:
        return self.samples.hold(ids)

    def placed(self, located: Located, ids: Ids, tokens_of: Ids) -> Located:
        return self.samples.placed(located, ids, tokens_of)

    def opened(self, place: int) -> Descriptor:
        return self.samples.opened(place)

    @contextmanager
    def expect(self, windows: Iterable[Window], order: Order | Selected, limit: int) -> Iterator[None]:
        """Until the block ends, read ahead for the windows, within `limit` bytes on disk, which nothing exceeds.

        windows: of this process, for all steps to come, counted over all epochs. Call before any sample is read.
        """
        blocks = Blocks.of(order)
        schedule = Schedule(windows, min(len(blocks), 1 << 17), order.steps_per_epoch)
        self.samples.follow(blocks, limit, schedule)
        self._ahead = ReadAhead(self.samples, schedule)
        try:
            yield
        finally:
            self._ahead.close()

    def finished(self, step: int) -> None:
        if self._ahead is not None:
            self._ahead.finished(step)

    def seconds_waited(self) -> float:
        return self.samples.clock.seconds()

    def beton_bytes(self) -> NDArray[np.int64] | None:
        return self.samples.shard_bytes()


class RemoteTars(_Cached):
    """A dataset's files on disk, whose tars are at an address."""

    def __init__(self, folder: Path, index: DatasetIndex, tars: TarFiles, open_shard: Callable[[int], Shard]) -> None:
        super().__init__(folder)
        self._whole = threading.Lock()
        self.samples = CachedSamples(None, tars, lambda: self.cache, index, {}, open_shard)


class RemoteFiles(_Cached):
    """A dataset's files at an address; if it is in place, its tars are there or on disk."""

    def __init__(
        self, address: Address, index: DatasetIndex, tars: TarFiles | None, open_shard: Callable[[int], Shard]
    ) -> None:
        """open_shard: returns a shard whose files this object has created. Raises OSError, DatasetError."""
        self._address, self._index, self._whole = address, index, threading.Lock()
        shards, fetched = address / SHARD_FOLDER, tars if tars and tars.root.is_remote else None
        names, sizes, others = {*index.shard_files()}, dict[str, int](), 0
        for name, size, _ in shards.listing():
            if name in names:
                sizes[name] = size
            elif (others := others + 1) > max(10_000, 10 * len(names)):  # else an endless listing
                raise DatasetError(
                    f"{shards} holds more than {others - 1:,} objects that are no files of the dataset; delete them"
                )
        self.samples = CachedSamples(shards, fetched, lambda: self.cache, index, sizes, open_shard)

    @property
    def folder(self) -> Path:
        return self.cache

    def names(self) -> Iterable[str]:
        return self.samples.sizes

    def whole(self, name: str) -> Path:
        """Return the path of a small file or a table, fetched whole on first use. Raises OSError."""
        path = self.folder / name
        with self._whole:
            if not path.exists():
                with written_aside(path) as file, self.samples.clock.waiting():
                    (self._address / name).download(file)
        return path

    def beton_size(self, shard: int) -> int:
        return self.samples.sizes[self._index.shard_name(shard, "beton")]

    def prepare(self, shard: int) -> None:
        self.samples.prepare(shard)

    def bring_records(self, shard: int) -> None:
        self.samples.bring_records(self._ids(shard))

    def _ids(self, shard: int) -> Ids:
        return np.arange(*self._index.first_id[shard : shard + 2])

    @contextmanager
    def whole_shard(self, shard: int) -> Iterator[None]:
        beton, rows, table = (f"{SHARD_FOLDER}/{self._index.shard_name(shard, suffix)}" for suffix in SHARD_SUFFIXES)
        for name in (beton, rows):
            with (self.folder / name).open("wb") as file:
                (self._address / name).download(file)
        self.whole(table)
        ids = self._ids(shard)
        self.samples.records_came(shard)
        self.samples.on_disk = range(ids[0], ids[-1] + 1)
        try:
            yield
        finally:
            self.samples.on_disk = range(0)
            for name in (beton, table):
                (self.folder / name).unlink()
