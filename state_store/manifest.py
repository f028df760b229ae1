"""Reading icechunk's manifests: which chunk files do the arrays of a snapshot need?

icechunk tells nobody, and deletes what it does not find among its references; so the collector has to know by itself.
A manifest (version 1 of icechunk's format) is a header of 39 bytes, then a flatbuffer, compressed with zstd. The
schema is icechunk's manifest.fbs:

    table Manifest      { id, arrays: [ArrayManifest] }
    table ArrayManifest { node_id, refs: [ChunkRef] }
    table ChunkRef      { index, inline, offset, length, chunk_id: struct of 12 bytes, … }
"""

import base64
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numcodecs.zstd import Zstd

_MAGIC: Final = "ICE🧊CHUNK".encode()
_LIBRARY_BYTES = 24
"""Name and version of what wrote it: not looked at."""
_VERSION_1_MANIFEST_ZSTD: Final = b"\x01\x02\x01"
_ARRAYS, _REFS, _CHUNK_ID = 1, 1, 4
"""Places of the fields in their tables."""
_ID_BYTES, _ID_LETTERS = 12, 20
_CROCKFORD = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789ABCDEFGHJKMNPQRSTVWXYZ")
"""icechunk names files in base 32 with the digits of Crockford; Python has those of RFC 4648."""


class ChunkRefs(NamedTuple):
    """What a manifest refers to. total: of all chunks. files: names of those that are files, in chunks/."""

    total: int
    files: set[str]


def chunk_refs(manifest: bytes) -> ChunkRefs:
    """Return the chunks of all arrays of a manifest, given the bytes of its file. Raises ValueError."""
    header = len(_MAGIC) + _LIBRARY_BYTES + len(_VERSION_1_MANIFEST_ZSTD)
    if not manifest.startswith(_MAGIC) or manifest[header - 3 : header] != _VERSION_1_MANIFEST_ZSTD:
        raise ValueError("it is no manifest of version 1 of icechunk's format")
    try:
        buffer = _Flatbuffer(Zstd().decode(manifest[header:]))
        (field,) = buffer.fields(buffer.root(), _ARRAYS)
        vectors = [buffer.vector(field) for field in buffer.fields(buffer.vector(field), _REFS)]
        refs = np.concatenate(vectors) if vectors else np.empty(0, np.int64)
        ids = buffer.bytes_at(buffer.fields(refs, _CHUNK_ID, optional=True), _ID_BYTES)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"its content is no manifest: {error}") from None
    return ChunkRefs(len(refs), {_name(identity) for identity in set(map(bytes, ids))})


def _name(identity: bytes) -> str:
    return base64.b32encode(identity)[:_ID_LETTERS].decode().translate(_CROCKFORD)


class _Flatbuffer:
    """Many tables at once: positions are int64 [any]. An access beyond the end raises IndexError."""

    def __init__(self, data: bytes) -> None:
        self._bytes = np.frombuffer(data, np.uint8)

    def root(self) -> npt.NDArray[np.int64]:
        return self._number(np.zeros(1, np.int64), "<u4")

    def fields(self, tables: npt.NDArray[np.int64], place: int, *, optional: bool = False) -> npt.NDArray[np.int64]:
        """Return where a field of each table lies; optional: tables without it are left out, else IndexError."""
        layouts = tables - self._number(tables, "<i4")
        slot = 4 + 2 * place
        has_slot = self._number(layouts, "<u2") > slot
        offsets = np.zeros(len(tables), np.int64)
        offsets[has_slot] = self._number(layouts[has_slot] + slot, "<u2")
        if not optional and not offsets.all():
            raise IndexError("a field is missing")
        return (tables + offsets)[offsets > 0]

    def vector(self, field: np.int64) -> npt.NDArray[np.int64]:
        """Return where the tables of a vector of tables lie."""
        (start,) = self._follow(np.array([field]))
        (length,) = self._number(np.array([start]), "<u4")
        if length > len(self._bytes):
            raise IndexError("a vector is longer than the buffer")
        return self._follow(start + 4 + 4 * np.arange(length))

    def bytes_at(self, positions: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint8]:
        """Return the bytes that begin at each position, [positions, length]."""
        if len(positions) and not (positions.min() >= 0 and positions.max() + length <= len(self._bytes)):
            raise IndexError("an offset leads out of the buffer")
        found: npt.NDArray[np.uint8] = self._bytes[positions[:, None] + np.arange(length)]
        return found

    def _follow(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return positions + self._number(positions, "<u4")

    def _number(self, positions: npt.NDArray[np.int64], dtype: str) -> npt.NDArray[np.int64]:
        raw = self.bytes_at(positions, np.dtype(dtype).itemsize)
        return raw.view(dtype).reshape(-1).astype(np.int64)
