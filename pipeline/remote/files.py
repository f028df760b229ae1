"""The files of a dataset in an object store, as a dataset sees them: a folder that fills as it is read."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...storage.bucket import Address
from ...storage.files import written_aside
from ..dataset_files import Held
from ..dataset_index import SHARD_FOLDER, SHARD_SUFFIXES, DatasetIndex
from ..errors import DatasetError
from ..order import Order, Selected, Window
from . import sparse
from .blocks import Blocks
from .cache_folder import CacheFolder
from .plan import Ids
from .read_ahead import ReadAhead
from .samples import CachedSamples
from .schedule import Schedule

if TYPE_CHECKING:
    from ..shard import Shard

_MAX_SCHEDULED = 1 << 17
_MAX_OTHERS = 10_000
"""Limit of foreign objects in the shards' folder, against an endless listing."""


class RemoteFiles:
    """A dataset's files at an address, in this object's own cache folder, which is removed with it.

    Nothing outlives the process: it reads only bytes that it fetched itself. Thread-safe.
    """

    def __init__(self, address: Address, index: DatasetIndex, open_shard: Callable[[int], Shard]) -> None:
        """open_shard: returns a shard whose files this object has created. Raises OSError, DatasetError."""
        self._address, self._index, self._whole = address, index, threading.Lock()
        shards = address / SHARD_FOLDER
        sizes = _sizes(shards, index)
        self.samples = CachedSamples(shards, lambda: self.folder / SHARD_FOLDER, index, sizes, open_shard)
        self._ahead: ReadAhead | None = None

    @cached_property
    def folder(self) -> Path:
        with self._whole:
            if (made := self.__dict__.get("folder")) is not None:  # another thread made it meanwhile
                return Path(made)
            folder = CacheFolder()
            weakref.finalize(self, folder.remove)
            (folder.path / SHARD_FOLDER).mkdir()
            sparse.refuse_if_whole(folder.path)
            return folder.path

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

    def prepare(self, shard: int) -> None:
        self.samples.prepare(shard)

    def bring_records(self, shard: int) -> None:
        self.samples.bring_records(shard)

    def hold(self, ids: Ids) -> Held:
        return self.samples.hold(ids)

    @contextmanager
    def expect(self, windows: Iterable[Window], order: Order | Selected, limit: int) -> Iterator[None]:
        """Until the block ends, read ahead for the windows, within `limit` bytes on disk, which nothing exceeds.

        windows: of this process, for all steps to come, counted over all epochs. Call before any sample is read.
        """
        blocks = Blocks.of(order)
        schedule = Schedule(windows, min(len(blocks), _MAX_SCHEDULED), order.steps_per_epoch)
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
        names = (self._index.shard_name(shard, "beton") for shard in range(len(self._index.first_id) - 1))
        return np.array([self.samples.sizes[name] for name in names], np.int64)

    @contextmanager
    def whole_shard(self, shard: int) -> Iterator[None]:
        self.prepare(shard)
        beton, rows, table = (f"{SHARD_FOLDER}/{self._index.shard_name(shard, suffix)}" for suffix in SHARD_SUFFIXES)
        for name in (beton, rows):
            with (self.folder / name).open("r+b") as file:
                (self._address / name).download(file)
        table_file = self.whole(table)
        self.samples.all_came(shard)
        try:
            yield
        finally:
            self.samples.drop_all(shard)
            table_file.unlink()


def _sizes(folder: Address, index: DatasetIndex) -> dict[str, int]:
    """Return the sizes of the existing shard files, by name. Raises DatasetError for too many other objects."""
    expected = set(index.shard_files())
    found, others = dict[str, int](), 0
    for name, size in folder.objects():
        if name in expected:
            found[name] = size
            continue
        others += 1
        if others > _MAX_OTHERS:
            raise DatasetError(
                f"{folder} holds more than {_MAX_OTHERS:,} objects that are no files of the dataset; delete them"
            )
    return found
