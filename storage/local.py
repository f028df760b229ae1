"""A path in the file system, with the verbs that `bucket.Address` has as well."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PosixPath
from typing import BinaryIO, ClassVar

from . import files

SEEN_WITHIN_SECONDS = 5.0
"""Time within which a file written on one machine must be visible on the others."""


class LocalPath(PosixPath):
    """A file or a folder. Files appear by a rename, are flushed, and nothing is written through a link.

    All verbs raise OSError, and NotRegularFileError where a link or a device is in the way.
    """

    is_remote: ClassVar[bool] = False
    """Whether each operation is a request over the network."""
    keeps_copies: ClassVar[bool] = False
    """Whether every file is kept more than once, so that damage to it need not be reckoned with."""
    noun: ClassVar[str] = "directory"
    """What a user chooses another of."""
    occupied: ClassVar[str] = "is not empty; choose another directory"
    sharing: ClassVar[str] = "set --out to a directory on a disk that all machines share"
    """How all ranks come to see the same files."""
    lease: ClassVar[None] = None

    # Not `read`: libraries take what has it for an open file.
    def read_bytes(self, max_bytes: int = files.MAX_TEXT_BYTES) -> bytes:
        """Return the content of a regular file. Raises OSError if it exceeds `max_bytes`."""
        return files.read_regular(self, max_bytes)

    def read_version(self, max_bytes: int = files.MAX_TEXT_BYTES) -> tuple[bytes, str]:
        """Return what `read_bytes` does, and a version for `supersede`: files have none."""
        return self.read_bytes(max_bytes), ""

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open a regular file of any size for reading."""
        with files.open_regular(self) as file:
            yield file

    def create(self, data: bytes) -> None:
        """Write a file unless there is one. Raises FileExistsError if there is."""
        files.write_atomically(self, data, replace=False)

    def rewrite(self, data: bytes) -> None:
        """Write a small file whole; a reader sees the one before or this one. Durable on return."""
        files.write_atomically(self, data)

    def supersede(self, data: bytes, version: str | None) -> None:
        """Write a file in place of the one of that version, which only a bucket can tell; None: of none."""
        self.rewrite(data)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files below this folder; missing ones are no error."""
        for name in names:
            (self / name).unlink(missing_ok=True)

    def modified(self) -> float:
        """Return when a file was written, in seconds since 1970."""
        return self.stat().st_mtime

    def is_present(self) -> bool:
        """Return whether there is a file, a folder or a link."""
        return os.path.lexists(self)

    def is_missing(self) -> bool:
        """Return whether there is nothing, or a folder; a link counts as a file."""
        try:
            return stat.S_ISDIR(self.lstat().st_mode)
        except FileNotFoundError:
            return True

    def is_folder(self) -> bool:
        """Return whether there is a folder; an address may be one of any number of objects."""
        return self.is_dir()

    def holds(self, index: str) -> bool:
        """Return whether there is a folder, which appears whole; in a bucket, whether it has `index`."""
        return self.exists()

    def is_taken(self, index: str) -> bool:
        """Return whether a folder can no longer be made here: there is a file, or a folder with content."""
        return self.exists() and (not self.is_dir() or any(self.iterdir()))

    def names(self) -> list[str]:
        """Return the names of the files in a folder, in any order; none without the folder."""
        with suppress(FileNotFoundError), os.scandir(self) as entries:
            return [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
        return []

    def irregular_names(self) -> Iterator[str]:
        """Yield the names in a folder that are not regular files, such as pipes, on which a reader would wait."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self) as entries:
            yield from (entry.name for entry in entries if not entry.is_file())

    def half_written(self) -> list[str]:
        """Return the names of temporary files in a folder that a killed writer left."""
        return [path.name for path in self.glob(".*.partial")]

    def content(self) -> Iterator[str]:
        """Yield the names of some of what is in a folder; of a file, its own."""
        if self.exists():
            yield from (path.name for path in (self.iterdir() if self.is_dir() else (self,)))

    def matching(self, pattern: str) -> Iterator[LocalPath]:
        """Yield the files below a folder whose names match a pattern; a file itself, whatever its name."""
        yield from self.rglob(pattern) if self.is_dir() else (self,)

    def size_below(self) -> int:
        """Return the bytes of all files in a folder, 0 if it is missing; links do not count, and files may vanish."""
        total = 0
        for within, _, names in os.walk(self):  # rglob fails where a folder vanishes
            for name in names:
                with suppress(OSError):
                    found = os.lstat(os.path.join(within, name))
                    total += found.st_size if stat.S_ISREG(found.st_mode) else 0
        return total

    def make(self) -> list[Path]:
        """Make a folder and those above it; return the ones that were missing, deepest first."""
        made = [Path(each) for each in (self, *self.parents) if not each.exists()]
        self.mkdir(parents=True, exist_ok=True)
        return made

    @contextmanager
    def built(self) -> Iterator[LocalPath]:
        """Yield a folder that gets this name when the block ends; what a killed block left of it is removed."""
        building = self.with_name(f".{self.name}.partial")
        self.parent.mkdir(parents=True, exist_ok=True)
        files.refuse_link(self)
        files.refuse_link(building)
        shutil.rmtree(building, ignore_errors=True)
        yield building
        building.rename(self)
        files.sync(self.parent)

    def refuse_link(self) -> None:
        """Raise NotRegularFileError if the path is a link; objects have none."""
        files.refuse_link(self)

    def refuse_foreign_folder(self) -> None:
        """Raise NotRegularFileError if there is something that is not a folder, or a link."""
        if self.is_present():
            files.own_directory(self)

    def refuse_foreign_file(self) -> None:
        """Raise NotRegularFileError if writing would change something else, as `files.open_own` does."""
        if self.is_present():
            os.close(files.open_own(self, os.O_RDONLY))

    def written_through(self) -> AbstractContextManager[None]:
        """Flush everything that the block wrote below this folder, once the block succeeds."""
        return files.written_through(self)

    def remove_leftovers(self) -> None:
        """Remove temporary files of killed writers in a folder. Call it only as the one that writes there."""
        files.remove_leftovers(self)

    def mark(self, name: str) -> None:
        """Write an empty file by which other machines see that they share this folder."""
        (self / f".ranks.{name}.partial").touch(exist_ok=False)

    def sees_mark(self, name: str) -> bool:
        """Return whether another machine's mark shows up."""
        mark, end = self / f".ranks.{name}.partial", time.monotonic() + SEEN_WITHIN_SECONDS
        while not (is_seen := mark.exists()) and time.monotonic() < end:
            # A network disk caches that a file is missing, and refreshes this when a directory is listed.
            for folder in (self.parent, self):
                with suppress(OSError):
                    os.listdir(folder)
            time.sleep(0.1)
        return is_seen

    def unmark(self, name: str) -> None:
        """Remove a mark."""
        (self / f".ranks.{name}.partial").unlink(missing_ok=True)

    @property
    def scratch(self) -> LocalPath:
        """The folder of this machine for working files: itself."""
        return self

    def made_scratch(self) -> LocalPath:
        """Return `scratch`, which the owner makes."""
        return self

    @contextmanager
    def on_this_machine(self, names: Iterable[str]) -> Iterator[LocalPath]:
        """Yield a folder of this name that holds these files: itself."""
        yield self

    def output(self, name: str) -> LocalPath:
        """Return where a report on this folder is written unless the user says otherwise: in it."""
        return self / name
