"""The files of a dataset in an object store, as a dataset sees them: a folder that fills as it is read."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from ...storage.bucket import Address
from ...storage.files import written_aside
from ..dataset.files import TarFiles
from ..dataset.index import SHARD_FOLDER, SHARD_SUFFIXES, DatasetIndex
from ..dataset.shard import Shard
from ..errors import DatasetError
from ..order.order import AnyOrder, Window
from .read_ahead import ReadAhead
from .samples import CachedSamples
from .schedule import Blocks, Schedule


class RemoteTars(CachedSamples):
    """A dataset's files on disk, whose tars are at an address."""

    _ahead: ReadAhead | None = None

    @contextmanager
    def expect(self, windows: Iterable[Window], order: AnyOrder, limit: int) -> Iterator[None]:
        """Until the block ends, read ahead for the windows, within `limit` bytes on disk, which nothing exceeds.

        windows: of this process, for all steps to come, counted over all epochs. Call before any sample is read.
        """
        blocks = Blocks.of(order)
        schedule = Schedule(windows, min(len(blocks), 1 << 17), order.steps_per_epoch)
        self.follow(blocks, limit, schedule)
        self._ahead = ReadAhead(self, schedule)
        try:
            yield
        finally:
            self._ahead.close()

    def finished(self, step: int) -> None:
        if self._ahead is not None:
            self._ahead.finished(step)


class RemoteFiles(RemoteTars):
    """A dataset's files at an address; if it is in place, its tars are there or on disk."""

    def __init__(
        self, address: Address, index: DatasetIndex, tars: TarFiles | None, open_shard: Callable[[int], Shard]
    ) -> None:
        """open_shard: returns a shard whose files this object has created. Raises OSError, DatasetError."""
        self._address, self._whole = address, Lock()
        shards, fetched = address / SHARD_FOLDER, tars if tars and tars.root.is_remote else None
        names, sizes, others = {*index.shard_files()}, dict[str, int](), 0
        for name, size, _ in shards.listing():
            if name in names:
                sizes[name] = size
            elif (others := others + 1) > max(10_000, 10 * len(names)):  # else an endless listing
                raise DatasetError(f"{shards} holds more than {others - 1:,} objects besides the dataset; delete them")
        super().__init__(Path(), index, fetched, open_shard, shards, sizes)  # `folder` is the cache

    @property
    def folder(self) -> Path:
        return self.cache

    def names(self) -> Iterable[str]:
        return self.sizes

    def whole(self, name: str) -> Path:
        """Return the path of a small file or a table, fetched whole on first use. Raises OSError."""
        path = self.folder / name
        with self._whole:
            if not path.exists():
                with written_aside(path) as file, self.clock.waiting():
                    (self._address / name).download(file)
        return path

    def beton_size(self, shard: int) -> int:
        return self.sizes[self._index.shard_name(shard, "beton")]

    @contextmanager
    def whole_shard(self, shard: int) -> Iterator[None]:
        beton, rows, table = (f"{SHARD_FOLDER}/{self._index.shard_name(shard, suffix)}" for suffix in SHARD_SUFFIXES)
        for name in (beton, rows):
            with (self.folder / name).open("wb") as file:
                (self._address / name).download(file)
        self.whole(table)
        self.records_came(shard)
        self.on_disk = range(*self._index.first_id[shard : shard + 2])
        try:
            yield
        finally:
            self.on_disk = range(0)
            for name in (beton, table):
                (self.folder / name).unlink()
