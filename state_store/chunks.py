"""Reading rows of one column; a chunk that cannot be read is named, with its file, instead of a decoder's complaint."""

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
    from .description import Description

_UNREADABLE = (icechunk.IcechunkError, ValueError)
"""What a damaged chunk makes of a read: icechunk misses the file, or a codec of zarr refuses the bytes."""
_FILE = re.compile(r"\b(chunk|manifest|snapshot)(?:s/|_id=)([0-9A-Z]{20})\b")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_LENGTH = re.compile(r"range=(\d+)\.\.")
_CHANGED = "its bytes are not those written, their checksum does not match"


ADVICE = (
    "Snapshots that do not share this chunk stay readable: `thermopile state log` lists the snapshots, "
    "`thermopile state check --all` tries each"
)
"""Ends the message of every DamagedChunkError."""


class _Damage(NamedTuple):
    """What is wrong, and where in the repository's directory."""

    file: str
    reason: str


def read_rows(
    group: zarr.Group, description: "Description", column: str, start: int, stop: int
) -> npt.NDArray[np.generic]:
    """Return the rows start … stop − 1 of one column, [stop − start], float32 or uint32.

    Raises DamagedChunkError, which names array, chunk and file, where a chunk is missing, cut short or not what was
    written; OSError where the process cannot read, for lack of a descriptor say, and the chunk may be whole. A block
    that was never written has no file and reads as initial values.
    """
    try:
        array = array_of(group, column)
    except (*_UNREADABLE, KeyError) as error:
        raise DamagedChunkError(
            f"array {column!r} is missing, or what describes it is damaged: {error!r}. {ADVICE}"
        ) from error
    try:
        return np.asarray(array[start:stop])
    except _UNREADABLE:
        # Once more, one by one: the error does not say which chunk it was.
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
            f"directory of the state: {found.reason}. {ADVICE}"
        ) from error


def _raise_if_not_the_files_fault(error: Exception) -> None:
    # A resume goes back to an older snapshot for a damaged one. It must not for want of a descriptor or of memory.
    if found := _OS_ERROR.search(str(error)):
        failure = OSError(int(found[1]), os.strerror(int(found[1])))
        if not is_damage(failure):
            raise failure from error


def _damage(error: icechunk.IcechunkError) -> _Damage:
    # icechunk draws a tree over many lines; the last one is what was wrong in the first place.
    return _Damage(_file_in(str(error)), str(error).strip().splitlines()[-1].strip(" |`->"))


def _damaged_bytes(array: "zarr.Array[Any]", chunk: int) -> _Damage:
    """Find the file whose bytes do not pass their checksum."""
    key = f"{array.path}/{array.metadata.encode_chunk_key((chunk,))}"
    try:
        held = sync(array.store.get(key, default_buffer_prototype()))
    except icechunk.IcechunkError as error:
        _raise_if_not_the_files_fault(error)
        return _damage(error)
    try:
        # icechunk names the file of a chunk in its errors alone. It refuses to read no bytes, and names it then.
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
