"""Deleting files that no snapshot of the history needs, and never any other file, whatever fails.

icechunk's garbage collection is not used: it takes as roots whatever references it can list at that moment, and deletes
data whose reference it failed to open, for example when out of descriptors. Here every kept file is known by name: the
history names a snapshot's files, and the manifests name the chunks. Each of these files is read and checked against its
sha256, and one that cannot be read is an error before anything is deleted. So is a directory that cannot be listed; an
incomplete listing only leaves garbage.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from .errors import DamagedFileError
from .history import Snapshot
from .icechunk_files import CHUNKS, MANIFESTS, REFERENCE, SNAPSHOTS, TRANSACTIONS, needed_files

_WRITTEN_BY_ICECHUNK = (SNAPSHOTS, MANIFESTS, CHUNKS, TRANSACTIONS)
_HALF_WRITTEN = ".*.partial"
"""Temporary files left by a killed writer."""


def find_garbage(state: Path, kept: Iterable[Snapshot]) -> list[Path]:
    """Return the files that no snapshot needs. No commit may be in progress.

    Includes leftovers of crashes and failed commits. Reads all files of `kept` except chunks.
    Raises DamagedFileError if one of them is missing or damaged, or a chunk is missing; OSError.
    """
    found = _found(state)
    needed = _needed(state, kept, found)
    garbage = [state / name for name in sorted(found - needed)]
    return [*garbage, *state.glob(_HALF_WRITTEN), *(state / REFERENCE).parent.glob(_HALF_WRITTEN)]


def find_damaged(state: Path, snapshots: Iterable[Snapshot]) -> Iterator[tuple[Snapshot, DamagedFileError]]:
    """Yield the snapshots that would make `find_garbage` fail if they were kept, with the reason. Raises OSError."""
    found = _found(state)
    for snapshot in snapshots:
        try:
            _needed(state, [snapshot], found)
        except DamagedFileError as error:
            yield snapshot, error


def delete(garbage: Iterable[Path]) -> None:
    """Delete files, ignoring missing ones. Raises OSError."""
    for file in garbage:
        file.unlink(missing_ok=True)


def _found(state: Path) -> set[str]:
    return {f"{directory}/{name}" for directory in _WRITTEN_BY_ICECHUNK for name in _files_in(state / directory)}


def _needed(state: Path, snapshots: Iterable[Snapshot], found: set[str]) -> set[str]:
    """Return the files that snapshots need, after checking that none is missing. Raises DamagedFileError, OSError.

    found: a listing of the files present.
    """
    needed = needed_files(state, (snapshot.files for snapshot in snapshots))
    for name in sorted(needed - found):
        if _is_missing(state / name):  # the listing alone is no proof
            raise DamagedFileError(name, "it is missing, and a snapshot to be kept needs it")
    return needed


def _is_missing(file: Path) -> bool:
    try:
        return stat.S_ISDIR(file.lstat().st_mode)
    except FileNotFoundError:
        return True


def _files_in(directory: Path) -> list[str]:
    with suppress(FileNotFoundError), os.scandir(directory) as entries:  # created with the first file
        return [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    return []
