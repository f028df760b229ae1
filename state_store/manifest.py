"""Read icechunk's manifests, to find the chunk files that a snapshot's arrays need.

icechunk has no API for this, and its own collector deletes everything that it cannot reach, so this module reads the
manifests. A manifest (version 1 of icechunk's format) is a header of 39 bytes followed by a zstd-compressed flatbuffer
with the schema of icechunk's manifest.fbs:

    table Manifest      { id, arrays: [ArrayManifest] }
    table ArrayManifest { node_id, refs: [ChunkRef] }
    table ChunkRef      { index, inline, offset, length, chunk_id: struct of 12 bytes, … }
"""

import base64
from typing import Final

import numpy as np
from numcodecs.zstd import Zstd

from ..storage.arrays import Int64s, Uint8s

_MAGIC: Final = "ICE🧊CHUNK".encode()
_LIBRARY_BYTES = 24
"""Name and version of the writer; ignored."""
_VERSION_1_MANIFEST_ZSTD: Final = b"\x01\x02\x01"
_ARRAYS, _REFS, _CHUNK_ID = 1, 1, 4
"""Indices of the fields in their tables."""
_ID_BYTES, _ID_LETTERS = 12, 20
_CROCKFORD = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789ABCDEFGHJKMNPQRSTVWXYZ")
"""icechunk encodes file names in Crockford's base 32; Python's base64 module has RFC 4648's alphabet."""


def chunk_refs(manifest: bytes) -> tuple[int, set[str]]:
    """Return the number of chunks of all arrays of a manifest, and the names of those in chunks/.

    manifest: its file's content. Raises ValueError.
    """
    header = len(_MAGIC) + _LIBRARY_BYTES + len(_VERSION_1_MANIFEST_ZSTD)
    if not manifest.startswith(_MAGIC) or manifest[header - 3 : header] != _VERSION_1_MANIFEST_ZSTD:
        raise ValueError("it is not a manifest in version 1 of icechunk's format")
    try:
        buffer = _Flatbuffer(Zstd().decode(manifest[header:]))
        (field,) = buffer.fields(buffer.root(), _ARRAYS)
        vectors = [buffer.vector(field) for field in buffer.fields(buffer.vector(field), _REFS)]
        refs = np.concatenate(vectors) if vectors else np.empty(0, np.int64)
        ids = buffer.bytes_at(buffer.fields(refs, _CHUNK_ID, optional=True), _ID_BYTES)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"its content is not a manifest: {error}") from None
    return len(refs), {_name(identity) for identity in set(map(bytes, ids))}


def _name(identity: bytes) -> str:
    return base64.b32encode(identity)[:_ID_LETTERS].decode().translate(_CROCKFORD)


class _Flatbuffer:
    """Vectorised access to many tables; positions are int64 [any]. Raises IndexError beyond the end."""

    def __init__(self, data: bytes) -> None:
        self._bytes = np.frombuffer(data, np.uint8)

    def root(self) -> Int64s:
        return self._number(np.zeros(1, np.int64), "<u4")

    def fields(self, tables: Int64s, place: int, *, optional: bool = False) -> Int64s:
        """Return the position of a field in each table. optional: skip tables without it, else raise IndexError."""
        layouts = tables - self._number(tables, "<i4")
        slot = 4 + 2 * place
        has_slot = self._number(layouts, "<u2") > slot
        offsets = np.zeros(len(tables), np.int64)
        offsets[has_slot] = self._number(layouts[has_slot] + slot, "<u2")
        if not optional and not offsets.all():
            raise IndexError("a field is missing")
        return (tables + offsets)[offsets > 0]

    def vector(self, field: np.int64) -> Int64s:
        """Return the positions of the tables in a vector of tables."""
        (start,) = self._follow(np.array([field]))
        (length,) = self._number(np.array([start]), "<u4")
        if length > len(self._bytes):
            raise IndexError("a vector is longer than the buffer")
        return self._follow(start + 4 + 4 * np.arange(length))

    def bytes_at(self, positions: Int64s, length: int) -> Uint8s:
        """Return `length` bytes from each position, [positions, length]."""
        if len(positions) and not (positions.min() >= 0 and positions.max() + length <= len(self._bytes)):
            raise IndexError("an offset is outside the buffer")
        return np.asarray(self._bytes[positions[:, None] + np.arange(length)])

    def _follow(self, positions: Int64s) -> Int64s:
        return positions + self._number(positions, "<u4")

    def _number(self, positions: Int64s, dtype: str) -> Int64s:
        raw = self.bytes_at(positions, np.dtype(dtype).itemsize)
        return raw.view(dtype).reshape(-1).astype(np.int64)
