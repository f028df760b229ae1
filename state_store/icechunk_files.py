"""The files of an icechunk repository: verified before icechunk parses them, deleted once no snapshot needs them.

icechunk has checksums for no file: a flipped bit becomes a panic, a KeyError or wrong rows. zarr's checksums cover
chunks. icechunk's garbage collection is not used either: its roots are the references that it can list, and if it fails
to open a reference, for example when out of descriptors, it deletes the reference's data. Here every kept file is known
by name: the history names a snapshot's files, and the manifests name the chunks. If any cannot be read, an error is
raised before anything is deleted.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import TypeVar

import icechunk

from ..storage.amazon import endpoint_url, has_own_host, is_anonymous, region
from ..storage.bucket import SIDE_BY_SIDE, Address
from ..storage.bucket_errors import is_away
from ..storage.files import MAX_TEXT_BYTES
from ..storage.place import Place, made_for
from .errors import DamagedFileError, StoreNotFoundError
from .manifest import chunk_refs

T = TypeVar("T")
R = TypeVar("R")
_CHUNKS, _MANIFESTS, _SNAPSHOTS = "chunks", "manifests", "snapshots"
_WRITTEN_BY_ICECHUNK = (_SNAPSHOTS, _MANIFESTS, _CHUNKS, "transactions")
BRANCH = "main"
REFERENCE = f"refs/branch.{BRANCH}/ref.json"
"""The start of a commit. icechunk cannot open a repository without it. It does not say which snapshots exist."""
_MAX_BYTES = 1 << 30
"""A manifest for 10⁹ rows takes less than a thousandth of this."""
_OF_THE_FILE = {None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EIO}
_REPEATS = icechunk.StorageRetriesSettings(max_tries=30, initial_backoff_ms=100, max_backoff_ms=10_000)
"""More tries would not outlast an unreachable store: icechunk gives up after 40 s to a minute and a half."""


def is_damage(error: OSError) -> bool:
    """Return whether the file itself is the cause of a failed read, unlike running out of descriptors, for example."""
    return not is_away(error) and error.errno in _OF_THE_FILE


def read_file(state: Place, name: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file, given its path in the state directory. Raises DamagedFileError, OSError."""
    with damage_to(name):
        return (state / name).read_bytes(max_bytes)


@contextmanager
def damage_to(name: str) -> Iterator[None]:
    """Turn an OSError that means a damaged or missing file into DamagedFileError."""
    try:
        yield
    except OSError as error:
        if not is_damage(error):
            raise
        raise DamagedFileError(name, "it is missing" if isinstance(error, FileNotFoundError) else str(error)) from error


def verified(state: Place, name: str, sha256: str) -> bytes:
    """Return the content of a file after checking its sha256. Raises DamagedFileError, OSError."""
    data = read_file(state, name, _MAX_BYTES)
    if _digest(data) != sha256:
        raise DamagedFileError(name, "its sha256 does not match")
    return data


def written_files(state: Place, snapshot_id: str, before: Mapping[str, str]) -> tuple[datetime, dict[str, str]]:
    """Read back a snapshot just written: return its time, and its files, path -> sha256.

    before: verified files that an earlier snapshot may share; each is verified again, so that later damage is not
    recorded as correct. Raises DamagedFileError, OSError, IcechunkError.
    """
    info = open_repository(state).lookup_snapshot(snapshot_id)
    name = f"{_SNAPSHOTS}/{snapshot_id}"
    files = {name: _digest(read_file(state, name, _MAX_BYTES))}
    for manifest in info.manifests:
        name = f"{_MANIFESTS}/{manifest.id}"
        data = read_file(state, name, _MAX_BYTES)
        files[name] = _digest(data)
        if before.get(name, files[name]) != files[name]:
            raise DamagedFileError(name, "its sha256 does not match")
        if (count := _chunks_in(name, data)[0]) != manifest.num_chunk_refs:
            raise DamagedFileError(name, f"it refers to {count:,} chunks, its snapshot to {manifest.num_chunk_refs:,}")
    return info.written_at, files


def for_each(state: Place, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield function(item) for each item; calls run concurrently in a bucket, since each waits for the network."""
    if not state.is_remote:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        yield from threads.map(function, items)


def find_garbage(state: Place, kept: Iterable[Mapping[str, str]], left: Set[str] = frozenset()) -> list[str]:
    """Return the paths of files that no snapshot needs, given the kept snapshots' files. No commit may be in progress.

    Includes leftovers of crashes and failed commits. left: other files to leave. Raises as `needed_files`.
    """
    present = present_files(state)
    refs = REFERENCE.rpartition("/")[0]
    half_written = [*state.half_written(), *(f"{refs}/{name}" for name in (state / refs).half_written())]
    return sorted(present - left - needed_files(state, kept, present)) + half_written


def needed_files(state: Place, snapshots: Iterable[Mapping[str, str]], present: Set[str] = frozenset()) -> set[str]:
    """Return the paths of all files that snapshots need, chunks included, given their other files, path -> sha256.

    Reads and verifies the given files, but no chunks. present: a listing of the files; files not in it are looked up.
    Raises DamagedFileError if a file is missing or damaged, or a chunk is missing; OSError.
    """

    def chunks_of(file: tuple[str, str]) -> set[str]:
        name, sha256 = file
        data = verified(state, name, sha256)
        if not name.startswith(_MANIFESTS):
            return set()
        return {f"{_CHUNKS}/{chunk}" for chunk in _chunks_in(name, data)[1]}

    files = sorted({pair for files in snapshots for pair in files.items()})
    needed = {name for name, _ in files}
    for chunks in for_each(state, chunks_of, files):
        needed |= chunks
    for name in sorted(needed - present):
        if (state / name).is_missing():
            raise DamagedFileError(name, "it is missing, and a snapshot to be kept needs it")
    return needed


def present_files(state: Place) -> set[str]:
    """List the paths of all files that icechunk wrote. Raises OSError if a directory cannot be listed."""
    return {f"{directory}/{name}" for directory in _WRITTEN_BY_ICECHUNK for name in (state / directory).names()}


def storage(state: Place) -> icechunk.Storage:
    """Return icechunk's access to the files; in a bucket, it takes credentials from the environment when needed."""
    return made_for(state, lambda path: icechunk.local_filesystem_storage(str(path.absolute())), _bucket_storage)


def _bucket_storage(state: Address) -> icechunk.Storage:
    if state.scheme == "gs":
        return icechunk.gcs_storage(bucket=state.bucket, prefix=state.key)
    if state.scheme == "az":
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        return icechunk.azure_storage(account=account, container=state.bucket, prefix=state.key)
    endpoint = endpoint_url()
    return icechunk.s3_storage(
        bucket=state.bucket,
        prefix=state.key,
        region=region(),
        endpoint_url=endpoint,
        allow_http=(endpoint or "").startswith("http://"),
        force_path_style=not has_own_host(state.bucket),
        anonymous=is_anonymous(),
    )


def open_repository(state: Place) -> icechunk.Repository:
    """Reopen the repository, bypassing anything cached in memory.

    Raises StoreNotFoundError if icechunk would read a file that this program does not write; OSError.
    """
    # Its settings could redirect icechunk elsewhere; this program writes none.
    if (state / "config.yaml").is_present():
        raise StoreNotFoundError(f"{state}: config.yaml was not written by thermopile; remove it")
    if not reference_is_sound(state):
        raise StoreNotFoundError(
            f"{state}: {REFERENCE} is damaged or missing; resuming the run rewrites it, or write to it "
            f'{{"snapshot": "ID"}} with the id of any snapshot in thermopile.json'
        )
    settings = icechunk.StorageSettings(retries=_REPEATS) if state.is_remote else None
    return icechunk.Repository.open(storage(state), icechunk.RepositoryConfig(storage=settings) if settings else None)


def reference_is_sound(state: Place) -> bool:
    """Return whether icechunk can read the branch reference. Raises OSError if the disk fails."""
    try:
        return re.fullmatch(rb'\{"snapshot": ?"[0-9A-HJKMNP-TV-Z]{20}"\}', read_file(state, REFERENCE)) is not None
    except DamagedFileError:
        return False


def point_reference_at(state: Place, snapshot_id: str) -> None:
    """Make the next commit start at this snapshot. Raises OSError."""
    (state / REFERENCE).rewrite(json.dumps({"snapshot": snapshot_id}).encode())


def refuse_links(state: Place) -> None:
    """Raise NotRegularFileError if part of the state would be written through a link."""
    for name in ("", *_WRITTEN_BY_ICECHUNK, "refs", f"refs/branch.{BRANCH}"):
        (state / name if name else state).refuse_link()


def refuse_pipes(state: Place) -> None:
    """Raise DamagedFileError for a chunk that is not a regular file: icechunk would block on a pipe."""
    # If the directory is missing, no chunk was written yet, or all are lost, which reading a chunk reports.
    for name in (state / _CHUNKS).irregular_names():
        raise DamagedFileError(f"{_CHUNKS}/{name}", "it is not a regular file; remove it")


def _chunks_in(name: str, manifest: bytes) -> tuple[int, set[str]]:
    try:
        return chunk_refs(manifest)
    except ValueError as error:
        raise DamagedFileError(name, str(error)) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
