"""A dataset's files, in a folder or in an object store behind a cache. Readers see a folder either way."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

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


class DatasetFiles(Protocol):
    """A dataset's files. Methods raise OSError if a file cannot be read."""

    @property
    def folder(self) -> Path:
        """The dataset's files by their names; files not requested below may be missing."""
        ...

    def names(self) -> Iterable[str]:
        """Return the file names in the shards' folder."""
        ...

    def whole(self, name: str) -> Path:
        """Return the path of tokenizer.json or a table, given its name in the dataset."""
        ...

    def beton_size(self, shard: int) -> int | None:
        """Return the bytes of a shard's .beton if it is not in the folder."""
        ...

    def prepare(self, shard: int) -> None:
        """Make a shard's files available for opening."""
        ...

    def bring_records(self, shard: int) -> None:
        """Make all records of a shard available."""
        ...

    def hold(self, ids: NDArray[np.int64]) -> Held:
        """Make the samples' records, pictures and tokens available until the result is released; ids int64 [b]."""
        ...

    def placed(self, located: Located, ids: NDArray[np.int64], tokens_of: NDArray[np.int64]) -> Located:
        """Return where held samples' pictures, and the tokens of others or these, are now; ids int64 [b] each."""
        ...

    def opened(self, place: int) -> Descriptor:
        """Return a file that `placed` has named, by its place below -1."""
        ...

    def whole_shard(self, shard: int) -> AbstractContextManager[None]:
        """Make every byte of a shard's files available while the block runs."""
        ...

    def expect(self, windows: Iterable[Window], order: Order | Selected, limit: int) -> AbstractContextManager[None]:
        """During the block, read ahead for the windows within `limit` bytes on disk."""
        ...

    def finished(self, step: int) -> None:
        """Record that the samples of all steps up to this one have been read."""
        ...

    def seconds_waited(self) -> float:
        """Return the seconds in which a reader waited for samples to be fetched."""
        ...

    def beton_bytes(self) -> NDArray[np.int64] | None:
        """Return the bytes of each shard's samples to cache, int64 [shards]; None if all are on disk."""
        ...


class LocalFiles:
    """Files in a folder, all of them present."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> Iterable[str]:
        """Return the file names in the shards' folder, in one listing. Raises DatasetError."""
        folder = self.folder / SHARD_FOLDER
        try:
            return os.listdir(folder)
        except OSError as error:
            raise DatasetError(f"{folder} cannot be read: {error.strerror}. Convert the dataset again.") from error

    def whole(self, name: str) -> Path:
        return self.folder / name

    def beton_size(self, shard: int) -> int | None:
        return None

    def prepare(self, shard: int) -> None:
        pass

    def bring_records(self, shard: int) -> None:
        pass

    def hold(self, ids: NDArray[np.int64]) -> Held:
        return _ALWAYS_THERE

    def placed(self, located: Located, ids: NDArray[np.int64], tokens_of: NDArray[np.int64]) -> Located:
        return located

    def opened(self, place: int) -> Descriptor:
        raise ValueError(f"place {place} is not on disk")

    def whole_shard(self, shard: int) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def expect(self, windows: Iterable[Window], order: Order | Selected, limit: int) -> Iterator[None]:
        yield

    def finished(self, step: int) -> None:
        pass

    def seconds_waited(self) -> float:
        return 0.0

    def beton_bytes(self) -> NDArray[np.int64] | None:
        return None


class _AlwaysThere(Held):
    def __init__(self) -> None:
        pass

    def release(self) -> None:
        pass


_ALWAYS_THERE = _AlwaysThere()
