"""shard-N.rows: the location of each row in its shard's .beton, with checksums.

A header and one 64-byte record per row, all numbers little-endian. A record ends in a checksum of itself, seeded with
its row number, which detects changed and swapped records. Only the records used are read.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...storage.arrays import Int64s, Records, Uint8s, Uint64s
from ...storage.files import RegularFile
from ...storage.kernels import kernel
from ..errors import DatasetError
from .index import MAX_PIXELS
from .raw_bytes import read_at, xxh64

PAGE_BYTES = 1 << 21
"""Bytes of a page of the .beton, which no row crosses: so a row has no more."""
MAX_JPEG_BYTES = PAGE_BYTES - (1 << 16)
"""Maximum bytes of a picture; this leaves room for its tokens."""

RECORD = np.dtype(
    [
        ("jpeg_at", "<u8"),
        ("jpeg_bytes", "<u4"),
        ("captions", "<u4"),
        ("tokens_at", "<u8"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("source_index", "<i8"),
        ("jpeg_checksum", "<u8"),
        ("tokens_checksum", "<u8"),
        ("checksum", "<u8"),
    ]
)
"""A row: offset (`picture_places`) and length of its JPEG; number of captions and offset of the first caption's tokens,
followed by the other captions'; height and width in pixels; index in the source's listing; XXH64 of the JPEG, of all
tokens, and of the record up to this last field, seeded with the row number."""

_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("record_bytes", "<u4"),
        ("rows", "<u8"),
        ("beton_bytes", "<u8"),
        ("unused", "V24"),
        ("checksum", "<u8"),
    ]
)
_MAGIC, _VERSION = b"thermrow", 1
_SEALED = RECORD.itemsize - 8
"""Bytes covered by the checksum of a record and of the header."""

NO_TARS = np.empty(0, np.int64)
IN_BETON = np.uint64(1 << 63)
"""Bit of `jpeg_at` in a dataset in place: the picture is in the .beton, not in a tar."""


class Extent(NamedTuple):
    """Limits that a row must lie within."""

    beton_bytes: int
    tokens_bytes: int
    """Bytes of one caption's tokens; 0 without captions."""
    captions: int
    """Maximum captions per sample."""
    tar_bytes: Int64s
    """Sizes of the tars of a dataset in place, int64 [tars]; else NO_TARS."""


def write_row_records(path: Path, records: Records, beton_bytes: int) -> None:
    """Seal RECORD [rows] and write them to a new file."""
    sealed = records.copy()
    _seal(sealed.view(np.uint8).reshape(-1, RECORD.itemsize))
    header = np.zeros(1, _HEADER)
    header["magic"], header["version"], header["record_bytes"] = _MAGIC, _VERSION, RECORD.itemsize
    header["rows"], header["beton_bytes"] = len(records), beton_bytes
    _seal(header.view(np.uint8).reshape(1, -1))
    with path.open("xb") as file:
        file.write(header.tobytes())
        file.write(sealed.tobytes())


class RowRecords:
    """The records of a shard, read on demand and not cached."""

    def __init__(self, path: Path, rows: int, extent: Extent) -> None:
        """Raises DatasetError if the file has another number of rows or belongs to another .beton; OSError."""
        self._file, self._extent = RegularFile(path), extent
        header = np.zeros(1, _HEADER)
        came = read_at(self._file.number, 0, header.view(np.uint8))
        changed = _first_changed(header.view(np.uint8).reshape(1, -1), np.zeros(1, np.int64)) == 0  # sealed like row 0
        if not came or header["magic"][0] != _MAGIC or changed:
            raise DatasetError(f"{path} is not a shard's row table, or its header is damaged")
        version, width, told, beton_bytes = header[["version", "record_bytes", "rows", "beton_bytes"]][0].tolist()
        if (version, width) != (_VERSION, RECORD.itemsize):
            raise DatasetError(f"{path} has version {version}; only version {_VERSION} is supported")
        expected = _HEADER.itemsize + rows * RECORD.itemsize
        if told != rows or self._file.size != expected:
            raise DatasetError(f"{path} has {told:,} rows in {self._file.size:,} bytes, not {rows:,} in {expected:,}")
        if beton_bytes != extent.beton_bytes:
            has = f"{extent.beton_bytes:,}"
            raise DatasetError(f"{path} belongs to a .beton file of {beton_bytes:,} bytes; the one beside it has {has}")

    def read(self, rows: Int64s, records: Records) -> int:
        """Fill RECORD [k] with the records of these rows, int64 [k] within the shard.

        Returns the index of the first record that cannot be read or is damaged, else k.
        """
        return int(_read(self._file.number, rows, records.view(np.uint8).reshape(-1, RECORD.itemsize), self._extent))


def picture_places(records: Records, in_place: bool) -> tuple[Int64s, Uint64s]:
    """Return the tar with each picture of RECORD [k], -1 for the .beton, and the offset there: int64 and uint64 [k]."""
    jpeg_at = records["jpeg_at"]
    if not in_place:
        return np.full(len(records), -1), jpeg_at
    tars = (records["source_index"].astype(np.uint64) >> np.uint64(32)).astype(np.int64)
    return np.where(jpeg_at >= IN_BETON, -1, tars), jpeg_at & ~IN_BETON


@kernel()
def _read(file: int, rows: Int64s, records: Uint8s, extent: Extent) -> int:
    for i in range(len(rows)):
        if not read_at(file, (rows[i] + 1) * records.shape[1], records[i]):
            return i
    sound = _first_changed(records, rows)
    for i in range(sound):
        if not _is_within(records[i], extent):
            return i
    return sound


@kernel()
def _is_within(record: Uint8s, extent: Extent) -> bool:
    """Return whether a record, uint8 [64], points inside the files and to a possible picture."""
    words, halves = record.view(np.uint64), record.view(np.uint32)  # numba (0.68) loses cached functions of structures
    jpeg_at, size, captions, tokens_at = words[0], np.uint64(halves[2]), np.uint64(halves[3]), words[2]
    pixels, of_tokens = np.uint64(halves[6]) * np.uint64(halves[7]), captions * np.uint64(extent.tokens_bytes)
    end = jpeg_end = np.uint64(extent.beton_bytes)
    if len(extent.tar_bytes):  # as in picture_places
        tar = words[4] >> np.uint64(32)
        if jpeg_at < IN_BETON:
            jpeg_end = np.uint64(extent.tar_bytes[tar] if tar < len(extent.tar_bytes) else 0)
        jpeg_at &= ~IN_BETON
    return bool(
        0 < pixels <= MAX_PIXELS
        and 0 < size <= min(jpeg_end, np.uint64(PAGE_BYTES))
        and of_tokens <= min(end, np.uint64(PAGE_BYTES))
        # Never add: the sum of two such numbers can wrap around to an offset within the file.
        and jpeg_at <= jpeg_end - size
        and tokens_at <= end - of_tokens
        and captions <= np.uint64(extent.captions)
        and (captions == 0) == (extent.tokens_bytes == 0)
    )


@kernel()
def _first_changed(records: Uint8s, rows: Int64s) -> int:
    """Return the index of the first of uint8 [k, 64] whose checksum does not match its row, else k."""
    for i in range(len(records)):
        if xxh64(records[i, :_SEALED], np.uint64(rows[i])) != records[i, _SEALED:].view(np.uint64)[0]:
            return i
    return len(records)


@kernel()
def _seal(records: Uint8s) -> None:
    for row in range(len(records)):
        records[row, _SEALED:].view(np.uint64)[0] = xxh64(records[row, :_SEALED], np.uint64(row))
