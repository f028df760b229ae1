"""Reading rows of one column, with errors that name the damaged chunk and its file."""

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import icechunk
import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import SuffixByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync

from .commit import array_of
from .errors import DamagedChunkError
from .icechunk_files import is_damage

if TYPE_CHECKING:
    from .schema import Description

_UNREADABLE = (icechunk.IcechunkError, ValueError)
"""Errors that a damaged chunk causes: icechunk cannot find the file, or a zarr codec rejects its bytes."""
_FILE = re.compile(r"\b(chunk|manifest|snapshot)(?:s/|_id=)([0-9A-Z]{20})\b")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_LENGTH = re.compile(r"range=(\d+)\.\.")
_CHANGED = "its checksum does not match"


ADVICE = (
    "Snapshots that do not share this chunk are still readable: `thermopile state log` lists the snapshots, "
    "`thermopile state check --all` checks each"
)
"""The end of every DamagedChunkError message."""


class _Damage(NamedTuple):
    """What is wrong, and in which file of the state directory."""

    file: str
    reason: str


def read_rows(
    group: zarr.Group, description: "Description", column: str, start: int, stop: int
) -> npt.NDArray[np.generic]:
    """Return rows start … stop − 1 of one column, [stop − start], float32 or uint32.

    A block that was never written has no file and reads as initial values. Raises DamagedChunkError, naming array,
    chunk and file, if a chunk is missing, truncated or fails its checksum; OSError if the process cannot read, for
    example because it is out of file descriptors, and the chunk may be intact.
    """
    try:
        array = array_of(group, column)
    except (*_UNREADABLE, KeyError) as error:
        raise DamagedChunkError(
            f"array {column!r} is missing, or its metadata is damaged: {error!r}. {ADVICE}"
        ) from error
    try:
        return np.asarray(array[start:stop])
    except _UNREADABLE:
        # Retry chunk by chunk: the error does not say which chunk failed.
        chunks = range(start // description.block_rows, -(-stop // description.block_rows))
        pieces = [_read_chunk(array, column, chunk, description) for chunk in chunks]
        skipped = chunks.start * description.block_rows
        return np.concatenate(pieces)[start - skipped : stop - skipped]


def _read_chunk(
    array: "zarr.Array[Any]", column: str, chunk: int, description: "Description"
) -> npt.NDArray[np.generic]:
    start = chunk * description.block_rows
    stop = min(start + description.block_rows, description.samples)
    try:
        return np.asarray(array[start:stop])
    except _UNREADABLE as error:
        _raise_if_not_the_files_fault(error)
        found = _damage(error) if isinstance(error, icechunk.IcechunkError) else _damaged_bytes(array, chunk)
        raise DamagedChunkError(
            f"array {column!r}, chunk {chunk} (rows {start} … {stop - 1}) cannot be read: {found.file} in the "
            f"state directory: {found.reason}. {ADVICE}"
        ) from error


def _raise_if_not_the_files_fault(error: Exception) -> None:
    # A resume falls back to an older snapshot if one is damaged. Running out of descriptors or memory is not damage.
    if found := _OS_ERROR.search(str(error)):
        failure = OSError(int(found[1]), os.strerror(int(found[1])))
        if not is_damage(failure):
            raise failure from error


def _damage(error: icechunk.IcechunkError) -> _Damage:
    # icechunk formats the error as a tree over several lines; the last line is the root cause.
    return _Damage(_file_in(str(error)), str(error).strip().splitlines()[-1].strip(" |`->"))


def _damaged_bytes(array: "zarr.Array[Any]", chunk: int) -> _Damage:
    """Find the file whose bytes fail their checksum."""
    key = f"{array.path}/{array.metadata.encode_chunk_key((chunk,))}"
    try:
        held = sync(array.store.get(key, default_buffer_prototype()))
    except icechunk.IcechunkError as error:
        _raise_if_not_the_files_fault(error)
        return _damage(error)
    try:
        # Only icechunk's errors name a chunk's file, and it rejects a read of zero bytes, so this provokes one.
        sync(array.store.get(key, default_buffer_prototype(), SuffixByteRequest(0)))
    except icechunk.IcechunkError as refusal:
        length = _LENGTH.search(str(refusal))
        if held is not None and length and len(held) < int(length[1]):
            return _Damage(_file_in(str(refusal)), f"it holds {len(held):,} of the {int(length[1]):,} bytes written")
        return _Damage(_file_in(str(refusal)), _CHANGED)
    return _Damage("the manifest that holds it", _CHANGED)


def _file_in(text: str) -> str:
    match = _FILE.search(text)
    return f"{match[1]}s/{match[2]}" if match else "a file"
