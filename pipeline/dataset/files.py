"""A dataset's files: those in a folder, of which those in an object store behind a cache are a kind."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import DatasetError
from .index import SHARD_FOLDER

if TYPE_CHECKING:
    from ..order.order import Order, Selected, Window
    from .raw_bytes import Descriptor
    from .stored_sample import Located


class Held:
    """Keeps samples readable until `release`, or until this object is collected."""

    def __init__(self, release: Callable[[], None], forget: Callable[[], None]) -> None:
        """forget: like `release`, but called by the garbage collector, anywhere."""
        self._release, self._forgotten = release, weakref.finalize(self, forget)
        self._forgotten.atexit = False

    def release(self) -> None:
        """Let the samples go; repeated calls do no harm."""
        if self._forgotten.detach():
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class DatasetFiles:
    """A dataset's files in a folder; remote/files.py has those in an object store. Methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        """The dataset's files by their names; files not requested below may be missing."""
        return self._folder

    def names(self) -> Iterable[str]:
        """Return the file names in the shards' folder, in one listing. Raises DatasetError."""
        folder = self.folder / SHARD_FOLDER
        try:
            return os.listdir(folder)
        except OSError as error:
            raise DatasetError(f"{folder} cannot be read: {error.strerror}. Convert the dataset again.") from error

    def whole(self, name: str) -> Path:
        """Return the path of tokenizer.json or a table, given its name in the dataset."""
        return self.folder / name

    def beton_size(self, shard: int) -> int | None:
        """Return the bytes of a shard's .beton if it is not in the folder."""
        return None

    def prepare(self, shard: int) -> None:
        """Make a shard's files available for opening."""

    def bring_records(self, shard: int) -> None:
        """Make all records of a shard available."""

    def hold(self, ids: NDArray[np.int64]) -> Held:
        """Make the samples' records, pictures and tokens available until the result is released; ids int64 [b]."""
        return _ALWAYS_THERE

    def placed(self, located: Located, ids: NDArray[np.int64], tokens_of: NDArray[np.int64]) -> Located:
        """Return where held samples' pictures, and the tokens of others or these, are now; ids int64 [b] each."""
        return located

    def opened(self, place: int) -> Descriptor:
        """Return a file that `placed` has named, by its place below -1."""
        raise ValueError(f"place {place} is not on disk")

    def whole_shard(self, shard: int) -> AbstractContextManager[None]:
        """Make every byte of a shard's files available while the block runs."""
        return nullcontext()

    def expect(self, windows: Iterable[Window], order: Order | Selected, limit: int) -> AbstractContextManager[None]:
        """During the block, read ahead for the windows within `limit` bytes on disk."""
        return nullcontext()

    def finished(self, step: int) -> None:
        """Record that the samples of all steps up to this one have been read."""

    def seconds_waited(self) -> float:
        """Return the seconds in which a reader waited for samples to be fetched."""
        return 0.0

    def beton_bytes(self) -> NDArray[np.int64] | None:
        """Return the bytes of each shard's samples to cache, int64 [shards]; None if all are on disk."""
        return None


_ALWAYS_THERE = Held(lambda: None, lambda: None)
