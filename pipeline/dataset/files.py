"""A dataset's files: those in a folder, of which those in an object store behind a cache are a kind; and its tars."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...storage.arrays import Int64s
from ...storage.bucket_errors import AddressError
from ...storage.local import LocalPath
from ...storage.place import AnyPlace, made_for, place_of
from ..errors import CURE, DatasetError
from .index import SHARD_FOLDER, Tars

if TYPE_CHECKING:
    from ...storage.files import RegularFile
    from ..order.order import AnyOrder, Window
    from .stored_sample import Located

_log = logging.getLogger(__name__)


class Hold(AbstractContextManager["Hold"]):
    """Keeps samples readable until `release`, or until this object is collected."""

    def __init__(self, release: Callable[[], None], forget: Callable[[], None]) -> None:
        """forget: like `release`, but called by the garbage collector, anywhere."""
        self._release, self._forgotten = release, weakref.finalize(self, forget)
        self._forgotten.atexit = False

    def release(self) -> None:
        """Let the samples go; repeated calls do no harm."""
        if self._forgotten.detach():
            self._release()

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
            raise DatasetError(f"{folder} cannot be read: {error.strerror}. {CURE}") from error

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

    def hold(self, ids: Int64s) -> Hold:
        """Make the samples' records, pictures and tokens available until the result is released; ids int64 [b]."""
        return _ALWAYS_THERE

    def placed(self, located: Located, ids: Int64s, tokens_of: Int64s) -> Located:
        """Return where held samples' pictures, and the tokens of others or these, are now; ids int64 [b] each."""
        return located

    def opened(self, place: int) -> RegularFile:
        """Return a file that `placed` has named, by its place below -1."""
        raise ValueError(f"place {place} is not on disk")

    def whole_shard(self, shard: int) -> AbstractContextManager[None]:
        """Make every byte of a shard's files available while the block runs."""
        return nullcontext()

    def expect(self, windows: Iterable[Window], order: AnyOrder, limit: int) -> AbstractContextManager[None]:
        """During the block, read ahead for the windows within `limit` bytes on disk."""
        return nullcontext()

    def finished(self, step: int) -> None:
        """Record that the samples of all steps up to this one have been read."""

    def seconds_waited(self) -> float:
        """Return the seconds in which a reader waited for samples to be fetched."""
        return 0.0

    def beton_bytes(self) -> Int64s | None:
        """Return the bytes of each shard's samples to cache, int64 [shards]; None if all are on disk."""
        return None


_ALWAYS_THERE = Hold(lambda: None, lambda: None)


class TarFiles:
    """The tars' places, sizes and versions of today, by number."""

    def __init__(self, recorded: Tars, root: AnyPlace | None = None) -> None:
        """List the root once. root: the folder or address of the tars now; None: as recorded.

        Raises DatasetError for a tar that is missing, or another one; OSError.
        """
        try:
            before = place_of(recorded.root)
            self.root = place_of(root or before)
        except AddressError as error:
            raise DatasetError(f"the root of the tars: {error}") from None
        self.names, self.sizes = [tar.name for tar in recorded.files], [tar.size for tar in recorded.files]
        names = set(self.names)
        found: dict[str, tuple[int, int | str]] = made_for(
            self.root,
            partial(_on_disk, names=names),
            lambda root: {name: (size, version) for name, size, version in root.listing() if name in names},
        )
        may_differ = not self.root.is_remote or self.root != before  # a copy has its own ETag, or time
        others = 0
        for name, size, version in recorded.files:
            size_now, version_now = found.get(name, (None, ""))
            others += version_now != version
            if size_now != size or not (may_differ or version_now == version):
                what = (
                    "is missing, or a link"
                    if size_now is None
                    else "is not what was converted: its size or ETag differs"
                )
                raise DatasetError(
                    f"{self.root / name} {what}. If the tars were moved, name their place with --tars ROOT "
                    "(data.tars), for a run by `thermopile train --out RUN --resume --tars ROOT`; if they were "
                    "changed, convert them again"
                )
        self.versions = [str(found[name][1]) for name in self.names]
        if others:
            _log.warning("%d tars in %s have another time or ETag, but their size; pictures are verified when read",
                         others, self.root)  # fmt: skip

    def path(self, number: int) -> Path:
        """Return the path of a tar below a local root."""
        return Path(str(self.root), self.names[number])


def _on_disk(root: LocalPath, names: Collection[str]) -> dict[str, tuple[int, int | str]]:
    """Return size and time of change of the regular files that exist; no link is followed below the root."""
    found = dict[str, tuple[int, int | str]]()
    for folder in {os.path.dirname(name) for name in names}:
        if (root / folder).resolve() != root.resolve() / folder:
            continue
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root / folder) as entries:
            for entry in entries:
                name = os.path.join(folder, entry.name)
                if name in names and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found[name] = status.st_size, status.st_mtime_ns
    return found
