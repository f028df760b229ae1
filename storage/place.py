"""A place is a path in the file system or an address in an object store; both have the same verbs.

Implementations that differ between the two are chosen here, so that no other module asks which kind a place is.
"""

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import copyfileobj
from typing import TypeAlias, TypeVar

from .bucket import SCRATCH, Address, is_address, made_folder, scratch_of
from .bucket_errors import AddressError
from .bucket_lock import BucketLock, bucket_lock_status
from .bucket_log import BucketLog, PartsReader
from .files import NotRegularFileError, RegularFile, written_aside
from .local import LocalPath
from .lock import FileLock, LockStatus, TakenOverError, file_lock_status
from .log import FileLog
from .step_folders import BucketSteps, LocalSteps

Place: TypeAlias = LocalPath | Address
AnyPlace: TypeAlias = str | os.PathLike[str] | Address
"""Types that a caller may pass for a place."""
Places: TypeAlias = AnyPlace | Sequence[AnyPlace]
"""A dataset's place, or those of a mixture's parts."""
Lock: TypeAlias = FileLock | BucketLock
Log: TypeAlias = FileLog | BucketLog
LogReader: TypeAlias = RegularFile | PartsReader
L = TypeVar("L")
B = TypeVar("B")


def place_of(given: AnyPlace) -> Place:
    """Return the place that the argument names. Raises AddressError for a malformed address."""
    if isinstance(given, LocalPath | Address):
        return given
    name = os.fspath(given)
    return Address.parse(name) if is_address(name) else LocalPath(name)


def places_of(given: Places) -> list[Place]:
    """Return the places that the argument names. Raises AddressError for a malformed address."""
    return [place_of(given)] if isinstance(given, str | os.PathLike | Address) else [*map(place_of, given)]


def made_for(place: Place, local: Callable[[LocalPath], L], bucket: Callable[[Address], B]) -> L | B:
    """Make the implementation that suits the place."""
    return bucket(place) if isinstance(place, Address) else local(place)


def duplicate(source: Place, to: Place) -> None:
    """Give a new file the content of one that is never changed in place: without writing it again, where that can be.

    On one file system it is a hard link, within a bucket a copy that the store makes, elsewhere a copy. Raises
    NotRegularFileError if the file is a link; OSError.
    """
    if isinstance(source, LocalPath) and not stat.S_ISREG(source.lstat().st_mode):
        raise NotRegularFileError(f"{source} is not a regular file; replace it with a copy of its target")
    if isinstance(to, Address):
        if not to.copied(source):
            with source.parent.on_this_machine((source.name,)) as folder:
                to.write(folder / source.name)
        return
    if isinstance(source, LocalPath):
        with suppress(OSError):
            os.link(source, to, follow_symlinks=False)
            return
    with written_aside(to) as copy:
        if isinstance(source, Address):
            source.download(copy)
        else:
            with source.opened() as file:
                copyfileobj(file, copy, 1 << 20)


def lock_at(file: Place, lost: Callable[[], TakenOverError], last_writer: Callable[[], str | None]) -> Lock:
    """Take the writer lock. Raises LockedError, OSError.

    lost: makes the error for a holder in a bucket whose lock another process took. last_writer: the last known writer,
    in case someone deleted its lock.
    """
    if isinstance(file, Address):
        return BucketLock(file, file.parent.made_scratch(), lost, last_writer())
    file.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(file)


def leased(place: Place, lock: Lock) -> Place:
    """Return the place with its lock attached as a lease, as the holder writes to it."""
    return replace(place, lease=lock) if isinstance(place, Address) and isinstance(lock, BucketLock) else place


def lock_status(file: Place) -> LockStatus:
    """Return the state of a lock. Raises OSError if the store fails."""
    return made_for(file, file_lock_status, bucket_lock_status)


def working_folder(place: Place) -> Path:
    """Make and return a folder for files that only this process needs: the place, unless THERMOPILE_SCRATCH is set."""
    if isinstance(place, Address) or not os.environ.get(SCRATCH):
        return place.made_scratch()
    return made_folder(scratch_of(str(place.absolute()), place.name))


def log_at(folder: Place, file: Path) -> Log:
    """Return a log that grows in a file on this machine; in a bucket, others see its parts below `folder`."""
    return BucketLog(folder, file) if isinstance(folder, Address) else FileLog(file)


def steps_in(folder: Place, files: tuple[str, ...]) -> LocalSteps | BucketSteps:
    """Return the folders `step-N` below a place. files: names of each folder's files, its seal last."""
    return BucketSteps(folder, files) if isinstance(folder, Address) else LocalSteps(folder)


def common_folder(folders: Sequence[Place]) -> str:
    """Return the deepest folder or address that holds all of these absolute places of one kind."""
    if isinstance(folders[0], Address):
        scheme = f"{folders[0].scheme}:/"
        if not all(str(folder).startswith(scheme) for folder in folders):
            raise AddressError(f"{folders[0]} and other addresses are in stores of different kinds; copy them to one")
        return scheme + os.path.commonpath([str(folder).removeprefix(scheme) for folder in folders])
    return os.path.commonpath([str(folder) for folder in folders])
