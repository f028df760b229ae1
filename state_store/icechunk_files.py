"""The files of an icechunk repository: verified before icechunk parses them, deleted once no snapshot needs them.

icechunk has checksums for no file: a flipped bit becomes a panic, a KeyError or wrong rows. Chunks carry zarr's. Its
garbage collection is not used either: it takes as roots the references that it can list, and deletes the data of one
that it failed to open, for example when out of descriptors. Here every kept file is known by name: the history names a
snapshot's files, and the manifests name the chunks. One that cannot be read is an error before anything is deleted.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import icechunk

from ..files import MAX_TEXT_BYTES, read_regular, refuse_link, write_atomically
from .errors import DamagedFileError, StoreNotFoundError
from .manifest import ChunkRefs, chunk_refs

_CHUNKS, _MANIFESTS, _SNAPSHOTS = "chunks", "manifests", "snapshots"
_WRITTEN_BY_ICECHUNK = (_SNAPSHOTS, _MANIFESTS, _CHUNKS, "transactions")
BRANCH = "main"
REFERENCE = f"refs/branch.{BRANCH}/ref.json"
"""Where a commit starts. icechunk cannot open a repository without it. It does not say which snapshots exist."""
_REFERENCE_TEXT = re.compile(rb'\{"snapshot": ?"[0-9A-HJKMNP-TV-Z]{20}"\}')
_MAX_BYTES = 1 << 30
"""A manifest for 10⁹ rows takes less than a thousandth of this."""
_HALF_WRITTEN = ".*.partial"
"""Temporary files left by a killed writer."""


def is_damage(error: OSError) -> bool:
    """Return whether a read failed because of the file: running out of descriptors, for one, says nothing about it."""
    return error.errno in (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EIO)


def read_file(state: Path, name: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file, given its path in the state directory. Raises DamagedFileError, OSError."""
    try:
        return read_regular(state / name, max_bytes)
    except OSError as error:
        if not is_damage(error):
            raise
        raise DamagedFileError(name, "it is missing" if error.errno == errno.ENOENT else str(error)) from error


def verified(state: Path, name: str, sha256: str) -> bytes:
    """Return the content of a file after checking its sha256. Raises DamagedFileError, OSError."""
    data = read_file(state, name, _MAX_BYTES)
    if _digest(data) != sha256:
        raise DamagedFileError(name, "its sha256 does not match")
    return data


def written_files(state: Path, snapshot_id: str, verified_before: Mapping[str, str]) -> tuple[datetime, dict[str, str]]:
    """Read back a snapshot just written: its time, and its files, path -> sha256.

    verified_before: files that may be shared with an earlier snapshot; each is verified, or damage since then would be
    recorded as correct. Raises DamagedFileError, OSError, IcechunkError.
    """
    info = open_repository(state).lookup_snapshot(snapshot_id)
    name = f"{_SNAPSHOTS}/{snapshot_id}"
    files = {name: _digest(read_file(state, name, _MAX_BYTES))}
    for manifest in info.manifests:
        name = f"{_MANIFESTS}/{manifest.id}"
        data = read_file(state, name, _MAX_BYTES)
        files[name] = _digest(data)
        if verified_before.get(name, files[name]) != files[name]:
            raise DamagedFileError(name, "its sha256 does not match")
        if (count := _chunks_in(name, data).total) != manifest.num_chunk_refs:
            raise DamagedFileError(
                name, f"it refers to {count:,} chunks, but its snapshot records {manifest.num_chunk_refs:,}"
            )
    return info.written_at, files


def find_garbage(state: Path, kept: Iterable[Mapping[str, str]]) -> list[Path]:
    """Return the files that no snapshot needs, given the files of those to keep. No commit may be in progress.

    Includes leftovers of crashes and failed commits. Raises as `needed_files`.
    """
    present = present_files(state)
    garbage = [state / name for name in sorted(present - needed_files(state, kept, present))]
    return [*garbage, *state.glob(_HALF_WRITTEN), *(state / REFERENCE).parent.glob(_HALF_WRITTEN)]


def needed_files(state: Path, snapshots: Iterable[Mapping[str, str]], present: Set[str] = frozenset()) -> set[str]:
    """Return the paths of all files that snapshots need, chunks included, given their other files, path -> sha256.

    Reads and verifies the given files, but no chunks. present: a listing of the files; one that it lacks is looked for.
    Raises DamagedFileError if a file is missing or damaged, or a chunk is missing; OSError.
    """
    needed: set[str] = set()
    for name, sha256 in sorted({pair for files in snapshots for pair in files.items()}):
        data = verified(state, name, sha256)
        needed.add(name)
        if name.startswith(_MANIFESTS):
            needed |= {f"{_CHUNKS}/{chunk}" for chunk in _chunks_in(name, data).files}
    for name in sorted(needed - present):
        if _is_missing(state / name):
            raise DamagedFileError(name, "it is missing, and a snapshot to be kept needs it")
    return needed


def present_files(state: Path) -> set[str]:
    """List the paths of all files that icechunk wrote. Raises OSError if a directory cannot be listed."""
    return {f"{directory}/{name}" for directory in _WRITTEN_BY_ICECHUNK for name in _files_in(state / directory)}


def _files_in(directory: Path) -> list[str]:
    with suppress(FileNotFoundError), os.scandir(directory) as entries:  # created with the first file
        return [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    return []


def _is_missing(file: Path) -> bool:
    try:
        return stat.S_ISDIR(file.lstat().st_mode)
    except FileNotFoundError:
        return True


def storage(state: Path) -> icechunk.Storage:
    return icechunk.local_filesystem_storage(str(state.absolute()))


def open_repository(state: Path) -> icechunk.Repository:
    """Reopen the repository, bypassing anything cached in memory.

    Raises StoreNotFoundError if a file that icechunk would read is not one that this program writes; OSError.
    """
    # Its settings could redirect icechunk to other places; this program writes none.
    if os.path.lexists(state / "config.yaml"):
        raise StoreNotFoundError(f"{state}: config.yaml was not written by thermopile; remove it")
    if not reference_is_sound(state):
        raise StoreNotFoundError(
            f"{state}: {REFERENCE} is damaged or missing; resuming the run rewrites it, or write to it "
            f'{{"snapshot": "ID"}} with the id of any snapshot in thermopile.json'
        )
    return icechunk.Repository.open(storage(state))


def reference_is_sound(state: Path) -> bool:
    """Return whether icechunk can read the branch reference. Raises OSError if the disk fails."""
    try:
        return _REFERENCE_TEXT.fullmatch(read_file(state, REFERENCE)) is not None
    except DamagedFileError:
        return False


def point_reference_at(state: Path, snapshot_id: str) -> None:
    """Make the next commit start at this snapshot. Raises OSError."""
    write_atomically(state / REFERENCE, json.dumps({"snapshot": snapshot_id}).encode())


def refuse_links(state: Path) -> None:
    """Raise NotRegularFileError if part of the state would be written through a link."""
    for name in ("", *_WRITTEN_BY_ICECHUNK, "refs", f"refs/branch.{BRANCH}"):
        refuse_link(state / name)


def refuse_pipes(state: Path) -> None:
    """Raise DamagedFileError for a chunk that is not a regular file: icechunk would block on a pipe."""
    # Without the directory, no chunk was written yet, or all are lost, which reading one reports.
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(state / _CHUNKS) as entries:
        for entry in entries:
            if not entry.is_file():
                raise DamagedFileError(f"{_CHUNKS}/{entry.name}", "it is not a regular file; remove it")


def _chunks_in(name: str, manifest: bytes) -> ChunkRefs:
    try:
        return chunk_refs(manifest)
    except ValueError as error:
        raise DamagedFileError(name, str(error)) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
