"""Deleting what no snapshot of the history needs, and never anything else, whatever fails meanwhile.

icechunk's own collection is not used: its roots are the references that it can list at that moment, and what it cannot
open, for lack of a descriptor say, it leaves out and deletes. Here everything that is kept is known by its name: from
the history to a snapshot's file and manifests, from those to the chunks. Each of them is read and held against its
sha256; a single one that cannot be read is an error, before anything is deleted. A directory that cannot be listed is
one as well, and one that is listed in part only leaves garbage.
"""

import os
from collections.abc import Iterable
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
    needed = needed_files(state, (snapshot.files for snapshot in kept))
    found = {f"{directory}/{name}" for directory in _WRITTEN_BY_ICECHUNK for name in _files_in(state / directory)}
    if missing := needed - found:
        raise DamagedFileError(min(missing), "it is missing, and a snapshot that is to be kept needs it")
    garbage = [state / name for name in sorted(found - needed)]
    return [*garbage, *state.glob(_HALF_WRITTEN), *(state / REFERENCE).parent.glob(_HALF_WRITTEN)]


def delete(garbage: Iterable[Path]) -> None:
    """Delete files; one that is gone already is passed over. Raises OSError."""
    for file in garbage:
        file.unlink(missing_ok=True)


def _files_in(directory: Path) -> list[str]:
    with suppress(FileNotFoundError), os.scandir(directory) as entries:  # made at the first file
        return [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    return []
