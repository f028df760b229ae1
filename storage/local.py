"""A path in the file system, with the same verbs as `bucket.Address`."""

import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path, PosixPath
from typing import BinaryIO, ClassVar, Self

from . import files
from .lock import FileLock, lock_holder

SEEN_WITHIN_SECONDS = 5.0
"""Time within which a file written on one machine must become visible on the others."""


class LocalPath(PosixPath):
    """A file or a folder. Writes are flushed and renamed into place, never made through a link.

    All verbs raise OSError, and NotRegularFileError if a link or a device is in the way.
    """

    is_remote: ClassVar[bool] = False
    """Whether each operation is a request over the network."""
    keeps_copies: ClassVar[bool] = False
    """Whether the storage keeps copies of every file, so that damage need not be expected."""
    noun: ClassVar[str] = "directory"
    """How messages name such a place, for example in "choose another …"."""
    occupied: ClassVar[str] = "is not empty; choose another directory"
    sharing: ClassVar[str] = "set --out to a directory on a disk that all machines share"
    """How to make all ranks see the same files."""
    lease: ClassVar[None] = None

    # Not `read`: libraries take an object with `read` for an open file.
    def read_bytes(self, max_bytes: int = files.MAX_TEXT_BYTES) -> bytes:
        """Return the content of a regular file. Raises OSError if it exceeds `max_bytes`."""
        return files.read_regular(self, max_bytes)

    def read_version(self, max_bytes: int = files.MAX_TEXT_BYTES) -> tuple[bytes, str]:
        """Return the content, and a version for `supersede`: files have none."""
        return self.read_bytes(max_bytes), ""

    def opened(self) -> BinaryIO:
        """Open a regular file of any size for reading."""
        return files.open_regular(self)

    def create(self, data: bytes) -> None:
        """Create a file. Raises FileExistsError if it exists."""
        files.write_atomically(self, data, replace=False)

    def rewrite(self, data: bytes) -> None:
        """Write a small file whole; readers see the old file or the new one. Durable on return."""
        files.write_atomically(self, data)

    def supersede(self, data: bytes, version: str | None) -> None:
        """Replace a file; None: create it. Only a bucket tells versions apart."""
        self.rewrite(data)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files below this folder; missing ones are no error."""
        for name in names:
            (self / name).unlink(missing_ok=True)

    def modified(self) -> float:
        """Return the time at which a file was written, in seconds since 1970."""
        return self.stat().st_mtime

    def is_present(self) -> bool:
        """Return whether the path names a file, a folder or a link."""
        return os.path.lexists(self)

    def is_missing(self) -> bool:
        """Return whether there is nothing here, or a folder; a link counts as a file."""
        try:
            return stat.S_ISDIR(self.lstat().st_mode)
        except FileNotFoundError:
            return True

    def is_folder(self) -> bool:
        """Return whether the path is a folder; an address may always have objects below it."""
        return self.is_dir()

    def holds(self, index: str) -> bool:
        """Return whether the folder exists, since a folder appears whole; in a bucket, whether it has `index`."""
        return self.exists()

    def is_taken(self, index: str) -> bool:
        """Return whether no folder can be made here: the path is a file, or a folder with content."""
        return self.exists() and (not self.is_dir() or any(self.iterdir()))

    def names(self) -> list[str]:
        """Return the names of the files in a folder, in any order; empty without the folder."""
        with suppress(FileNotFoundError), os.scandir(self) as entries:
            return [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
        return []

    def irregular_names(self) -> Iterator[str]:
        """Yield the names in a folder that are not regular files, such as pipes, which would block a reader."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self) as entries:
            yield from (entry.name for entry in entries if not entry.is_file())

    def half_written(self) -> list[str]:
        """Return the names of a killed writer's temporary files in a folder."""
        return [path.name for path in self.glob(".*.partial")]

    def content(self) -> Iterator[str]:
        """Yield some of the names in a folder; for a file, its own name."""
        if self.exists():
            yield from (path.name for path in (self.iterdir() if self.is_dir() else (self,)))

    def listing(self) -> Iterator[tuple[str, int, str]]:
        """Yield names, sizes and versions of the regular files below a folder; files have no versions."""
        for within, _, names in os.walk(self):  # rglob fails if a folder vanishes
            for name in names:
                with suppress(OSError):
                    found = os.lstat(path := os.path.join(within, name))
                    if stat.S_ISREG(found.st_mode):
                        yield os.path.relpath(path, self), found.st_size, ""

    def adopt(self, file: Path) -> str:
        """Give a complete file on the same disk, which is flushed, this name; return its version: files have none."""
        file.rename(self)
        files.sync(self.parent)
        return ""

    def files(self) -> Iterator[str]:
        """Yield the relative paths of all files and links below a folder; no link is followed. Raises OSError."""

        def fail(error: OSError) -> None:
            raise error

        for within, folders, names in os.walk(self, onerror=fail):
            links = (name for name in folders if os.path.islink(os.path.join(within, name)))
            yield from (os.path.relpath(os.path.join(within, name), self) for name in (*names, *links))

    def size_below(self) -> int:
        """Return the bytes of all files in a folder, 0 if it is missing; links do not count, and files may vanish."""
        return sum(size for _, size, _ in self.listing())

    def make(self) -> list[Path]:
        """Make a folder and its parents; return the folders that were missing, deepest first."""
        made = [Path(each) for each in (self, *self.parents) if not each.exists()]
        self.mkdir(parents=True, exist_ok=True)
        return made

    @contextmanager
    def built(self) -> Iterator[Self]:
        """Yield a folder that gets this name when the block ends, if this is free or an empty folder.

        It is removed if the block fails, and first what a killed block left, whose lock is still there. Raises
        LockedError if another builds it, FileExistsError for somebody else's file or folder of that name.
        """
        building, lock_file = (self.with_name(f".{self.name}.{end}") for end in ("partial", "lock"))
        self.parent.mkdir(parents=True, exist_ok=True)
        for each in (self, building):
            files.refuse_link(each)
        left_by = lock_holder(lock_file)[0] or ""
        if (left_by or any(building.content())) and not left_by.startswith("pid "):
            raise FileExistsError(f"{building}, or its .lock, was left by no killed process; rename it, and repeat")
        lock = FileLock(lock_file)
        building.clear()
        try:
            yield building
            building.rename(self)
        finally:
            building.clear()
            lock_file.unlink(missing_ok=True)
            lock.release()
        files.sync(self.parent)

    def clear(self) -> None:
        """Remove a folder and its content, as far as possible. Raises NotRegularFileError if it is a link."""
        files.refuse_link(self)
        shutil.rmtree(self, ignore_errors=True)

    def refuse_link(self) -> None:
        """Raise NotRegularFileError if the path is a link; objects have none."""
        files.refuse_link(self)

    def refuse_foreign_folder(self) -> None:
        """Raise NotRegularFileError if the path is a link or exists and is not a folder."""
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
        """Remove temporary files of killed writers in a folder. Only the folder's writer may call this."""
        files.remove_leftovers(self)

    def mark(self, name: str) -> Self:
        """Return the place of an empty file that shows other machines that they share this folder."""
        return self / f".ranks.{name}.partial"

    def is_seen(self) -> bool:
        """Return whether the file exists, or is about to be seen by this machine."""
        end = time.monotonic() + SEEN_WITHIN_SECONDS
        while not (is_there := self.exists()) and time.monotonic() < end:
            # A network disk caches that a file is missing until a directory is listed.
            for folder in (self.parent.parent, self.parent):
                with suppress(OSError):
                    os.listdir(folder)
            time.sleep(0.1)
        return is_there

    @property
    def scratch(self) -> Self:
        """This machine's folder for working files: the folder itself."""
        return self

    def made_scratch(self) -> Self:
        """Return `scratch`, which the owner makes."""
        return self

    def on_this_machine(self, names: Iterable[str]) -> AbstractContextManager[Self]:
        """Yield a folder of this name that holds these files: the folder itself."""
        return nullcontext(self)

    def output(self, name: str) -> Self:
        """Return the default path for a report on this folder: inside it."""
        return self / name
