"""Deleting what no snapshot of the history needs, and never anything else, whatever fails meanwhile.

icechunk's own collection is not used: its roots are the references that it can list at that moment, and what it cannot
open, for lack of a descriptor say, it leaves out and deletes. Here everything that is kept is known by its name: from
the history to a snapshot's file and manifests, from those to the chunks. Each of them is read and held against its
sha256; a single one that cannot be read is an error, before anything is deleted. A directory that cannot be listed is
one as well, and one that is listed in part only leaves garbage.
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
"""What a kill leaves of a file that was to be put in the place of another."""


def find_garbage(state: Path, kept: Iterable[Snapshot]) -> list[Path]:
    """Return the files that none of the snapshots needs; no commit may be under way.

    What crashes and failed commits have left is among them. Reads all of `kept` but their chunks.
    Raises DamagedFileError where a file of theirs, or a chunk, is missing or not what was written; OSError.
    """
    found = _found(state)
    needed = _needed(state, kept, found)
    garbage = [state / name for name in sorted(found - needed)]
    return [*garbage, *state.glob(_HALF_WRITTEN), *(state / REFERENCE).parent.glob(_HALF_WRITTEN)]


def find_damaged(state: Path, snapshots: Iterable[Snapshot]) -> Iterator[tuple[Snapshot, DamagedFileError]]:
    """Yield the snapshots that `find_garbage` would fail at if they were to be kept, each with why. Raises OSError."""
    found = _found(state)
    for snapshot in snapshots:
        try:
            _needed(state, [snapshot], found)
        except DamagedFileError as error:
            yield snapshot, error


def delete(garbage: Iterable[Path]) -> None:
    """Delete files; one that is gone already is passed over. Raises OSError."""
    for file in garbage:
        file.unlink(missing_ok=True)


def _found(state: Path) -> set[str]:
    return {f"{directory}/{name}" for directory in _WRITTEN_BY_ICECHUNK for name in _files_in(state / directory)}


def _needed(state: Path, snapshots: Iterable[Snapshot], found: set[str]) -> set[str]:
    """Return the files that snapshots need; none is missing. found: a listing. Raises DamagedFileError, OSError."""
    needed = needed_files(state, (snapshot.files for snapshot in snapshots))
    for name in sorted(needed - found):
        if _is_missing(state / name):  # a listing alone does not say so
            raise DamagedFileError(name, "it is missing, and a snapshot that is to be kept needs it")
    return needed


def _is_missing(file: Path) -> bool:
    try:
        return stat.S_ISDIR(file.lstat().st_mode)
    except FileNotFoundError:
        return True


def _files_in(directory: Path) -> list[str]:
    with suppress(FileNotFoundError), os.scandir(directory) as entries:  # made at the first file
        return [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    return []
