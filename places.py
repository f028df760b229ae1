"""Where a run's lasting files are: a directory, or all below an address in an object store.

A Path is treated as ever: files appear by a rename, are flushed, and nothing is written through a link. An object
appears whole, and lasts, once its request succeeds. What needs a file of this machine, such as a log that grows or a
working copy, is in `local_folder`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from . import files
from .files import MAX_TEXT_BYTES, own_directory, read_regular, refuse_link, write_atomically
from .objects import Address, ObjectStoreError, Place, delete_all

SCRATCH = "THERMOPILE_SCRATCH"
"""Environment variable: the folder for local files of runs in object stores; else `~/.cache/thermopile`."""


def local_folder(place: Place) -> Path:
    """Return the folder of this machine for working files of what is at `place`: itself, or for an address a folder of
    its own, which may not exist yet.
    """
    if isinstance(place, Path):
        return place
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    scratch = Path(os.environ.get(SCRATCH) or Path(cache) / "thermopile")
    digest = hashlib.sha256(str(place).encode()).hexdigest()[:12]
    return scratch.absolute() / f"{place.name or place.bucket}-{digest}"


def made_local_folder(place: Place) -> Path:
    """Return `local_folder`; for an address, make it. Raises NotRegularFileError if that is a link."""
    folder = local_folder(place)
    if isinstance(place, Address):
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        own_directory(folder)
    return folder


def read(place: Place, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file. Raises OSError, also if it exceeds `max_bytes`."""
    return read_regular(place, max_bytes) if isinstance(place, Path) else place.read(max_bytes)


def is_missing(file: Place) -> bool:
    """Return whether there is nothing, or a directory; a link counts as a file."""
    if isinstance(file, Address):
        return not file.exists()
    try:
        return stat.S_ISDIR(file.lstat().st_mode)
    except FileNotFoundError:
        return True


def modified(place: Place) -> float:
    """Return when a file was written, in seconds since 1970."""
    return place.stat().st_mtime if isinstance(place, Path) else place.modified()


def write(place: Place, data: bytes) -> None:
    """Write a file whole; a reader sees the one before or this one. Lasting on return. Raises OSError."""
    if isinstance(place, Path):
        write_atomically(place, data)
    else:
        place.rewrite(data)


def remove(places: Sequence[Place]) -> None:
    """Delete files; missing ones are no error."""
    for place in places:
        if isinstance(place, Path):
            place.unlink(missing_ok=True)
    delete_all([place for place in places if isinstance(place, Address)])


def names_in(folder: Place) -> list[str]:
    """Return the names of the files in a folder, in any order; none without the folder. Raises OSError."""
    if isinstance(folder, Address):
        return [name for name, _ in folder.objects() if "/" not in name]
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    return []


def refuse_link_at(place: Place) -> None:
    """Raise NotRegularFileError if a path is a link; objects have none."""
    if isinstance(place, Path):
        refuse_link(place)


def written_through(folder: Place) -> AbstractContextManager[None]:
    """Flush everything that the block wrote below `folder`, once the block succeeds; objects need no flushing."""
    return files.written_through(folder) if isinstance(folder, Path) else nullcontext()


@contextmanager
def on_this_machine(folder: Place, names: Sequence[str]) -> Iterator[Path]:
    """Yield a folder of this name that holds these files: itself, or a copy that is removed afterwards."""
    if isinstance(folder, Path):
        yield folder
        return
    scratch = local_folder(folder).parent
    scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    with TemporaryDirectory(prefix="thermopile-", dir=scratch) as temporary:
        copy = Path(temporary) / folder.name
        copy.mkdir()
        for name in names:
            with (copy / name).open("xb") as file:
                (folder / name).download(file)
        yield copy


def is_away(error: OSError) -> bool:
    """Return whether a store could not be used: this says nothing about the object."""
    return isinstance(error, ObjectStoreError | PermissionError)
