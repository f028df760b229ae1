"""The files of an icechunk repository; every file except chunks is checked against its sha256 before it is parsed.

icechunk has no checksums for them: a flipped bit becomes a panic, a KeyError or wrong rows.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import icechunk

from ..files import read_regular, refuse_link, write_atomically
from .errors import DamagedFileError, StoreNotFoundError
from .manifest import ChunkRefs, chunk_refs

CHUNKS, MANIFESTS, SNAPSHOTS, TRANSACTIONS = "chunks", "manifests", "snapshots", "transactions"
BRANCH = "main"
REFERENCE = f"refs/branch.{BRANCH}/ref.json"
"""Where a commit starts. icechunk cannot open a repository without it. It does not say which snapshots exist."""
_DIRECTORIES = (CHUNKS, MANIFESTS, SNAPSHOTS, TRANSACTIONS, "refs", f"refs/branch.{BRANCH}")
_REFERENCE_TEXT = re.compile(rb'\{"snapshot": ?"[0-9A-HJKMNP-TV-Z]{20}"\}')
_MAX_BYTES = 1 << 30
"""A manifest for 10⁹ rows takes less than a thousandth of this."""
_DAMAGE = {None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EIO}
"""Errors that mean a damaged file. Others, such as running out of descriptors, say nothing about the file."""


def is_damage(error: OSError) -> bool:
    """Return whether a read failed because of the file, rather than the process or the machine."""
    return error.errno in _DAMAGE


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_file(state: Path, name: str) -> bytes:
    """Return the content of a file, given its path in the state directory. Raises DamagedFileError, OSError."""
    try:
        return read_regular(state / name, _MAX_BYTES)
    except OSError as error:
        if not is_damage(error):
            raise
        raise DamagedFileError(name, "it is missing" if error.errno == errno.ENOENT else str(error)) from error


def verified(state: Path, name: str, sha256: str) -> bytes:
    """Return the content of a file after checking its sha256. Raises DamagedFileError, OSError."""
    data = read_file(state, name)
    if digest_of(data) != sha256:
        raise DamagedFileError(name, "its sha256 does not match")
    return data


def verify(state: Path, files: Mapping[str, str]) -> None:
    """Check files of a snapshot, path -> sha256. Raises DamagedFileError for the first damaged one; OSError."""
    for name, sha256 in files.items():
        verified(state, name, sha256)


def needed_files(state: Path, snapshots: Iterable[Mapping[str, str]]) -> set[str]:
    """Return the paths of all files that snapshots need, chunks included, given their files other than chunks.

    Reads and verifies the given files, but no chunks. Raises DamagedFileError, OSError.
    """
    needed: set[str] = set()
    for name, sha256 in sorted({pair for files in snapshots for pair in files.items()}):
        data = verified(state, name, sha256)
        needed.add(name)
        if name.startswith(MANIFESTS):
            needed |= {f"{CHUNKS}/{chunk}" for chunk in _chunks_in(name, data).files}
    return needed


def written_files(state: Path, snapshot_id: str) -> tuple[icechunk.SnapshotInfo, dict[str, str]]:
    """Read back a snapshot just written: icechunk's description of it, and its files, path -> sha256.

    Raises DamagedFileError, OSError, IcechunkError.
    """
    info = open_repository(state).lookup_snapshot(snapshot_id)
    name = f"{SNAPSHOTS}/{snapshot_id}"
    files = {name: digest_of(read_file(state, name))}
    for manifest in info.manifests:
        name = f"{MANIFESTS}/{manifest.id}"
        data = read_file(state, name)
        if (count := _chunks_in(name, data).total) != manifest.num_chunk_refs:
            raise DamagedFileError(
                name, f"it refers to {count:,} chunks, but its snapshot records {manifest.num_chunk_refs:,}"
            )
        files[name] = digest_of(data)
    return info, files


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
    refuse_link(state)
    for name in _DIRECTORIES:
        refuse_link(state / name)


def refuse_pipes(state: Path) -> None:
    """Raise DamagedFileError for a chunk that is not a regular file: icechunk would block on a pipe."""
    try:
        with os.scandir(state / CHUNKS) as entries:
            for entry in entries:
                if not entry.is_file():
                    raise DamagedFileError(f"{CHUNKS}/{entry.name}", "it is not a regular file; remove it")
    except (FileNotFoundError, NotADirectoryError):
        return  # no chunk was written yet, or all are lost, which reading one reports


def _chunks_in(name: str, manifest: bytes) -> ChunkRefs:
    try:
        return chunk_refs(manifest)
    except ValueError as error:
        raise DamagedFileError(name, str(error)) from error
