"""shard-N.rows: the location of each row in its shard's .beton, with checksums.

A header and one 64-byte record per row, all numbers little-endian. A record ends in a checksum of itself, seeded with
its row number, which detects changed and swapped records. Only the records used are read.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...storage.kernels import kernel
from ..errors import DatasetError
from .index import MAX_PIXELS
from .raw_bytes import Descriptor, read_at, xxh64

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


IN_BETON = np.uint64(1 << 63)
"""Bit of `jpeg_at` in a dataset in place: the picture is in the .beton, not in a tar."""


class Extent(NamedTuple):
    """Limits that a row must lie within."""

    beton_bytes: int
    tokens_bytes: int
    """Bytes of one caption's tokens; 0 without captions."""
    captions: int
    """Maximum captions per sample."""
    tar_bytes: NDArray[np.int64] | None = None
    """Sizes of the tars, int64 [tars], of a dataset in place."""


def write_row_records(path: Path, records: NDArray[np.void], beton_bytes: int) -> None:
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
        self._file, self._extent = Descriptor(path), extent
        header = np.zeros(1, _HEADER)
        came = self._file.read(0, header.view(np.uint8))
        changed = _first_changed(header.view(np.uint8).reshape(1, -1), np.zeros(1, np.int64)) == 0  # sealed like row 0
        if not came or header["magic"][0] != _MAGIC or changed:
            raise DatasetError(f"{path} is not a shard's row table, or its header is damaged")
        version, width, told, beton_bytes = (
            int(header[name][0]) for name in ("version", "record_bytes", "rows", "beton_bytes")
        )
        if (version, width) != (_VERSION, RECORD.itemsize):
            raise DatasetError(f"{path} has version {version}; only version {_VERSION} is supported")
        expected = _HEADER.itemsize + rows * RECORD.itemsize
        if told != rows or self._file.bytes != expected:
            raise DatasetError(
                f"{path} has {told:,} rows in {self._file.bytes:,} bytes, but dataset.json says "
                f"{rows:,} rows, which take {expected:,} bytes"
            )
        if beton_bytes != extent.beton_bytes:
            raise DatasetError(
                f"{path} belongs to a .beton file of {beton_bytes:,} bytes, but the one beside it has "
                f"{extent.beton_bytes:,}"
            )

    def read(self, rows: NDArray[np.int64], records: NDArray[np.void]) -> int:
        """Fill RECORD [k] with the records of these rows, int64 [k] within the shard.

        Returns the index of the first record that cannot be read or is damaged, else k.
        """
        place: int = _read(self._file.number, rows, records.view(np.uint8).reshape(-1, RECORD.itemsize))
        return first_outside(records[:place], self._extent)


def picture_places(records: NDArray[np.void], in_place: bool) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the tar with each picture of RECORD [k], -1 for the .beton, and the offset there: int64 and uint64 [k]."""
    jpeg_at = records["jpeg_at"]
    if not in_place:
        return np.full(len(records), -1), jpeg_at
    tars = (records["source_index"].astype(np.uint64) >> np.uint64(32)).astype(np.int64)
    return np.where(jpeg_at >= IN_BETON, -1, tars), jpeg_at & ~IN_BETON


def first_outside(records: NDArray[np.void], extent: Extent) -> int:
    """Return the index of the first of RECORD [k] that points outside a file or to an impossible picture, else k."""
    tars, jpeg_at = picture_places(records, extent.tar_bytes is not None)
    jpeg_ends = np.full(len(records), extent.beton_bytes)
    if (sizes := extent.tar_bytes) is not None:
        of_tars = np.where(tars < len(sizes), sizes.take(tars, mode="clip"), 0)
        jpeg_ends = np.where(tars < 0, jpeg_ends, of_tars)
    # By columns: numba (0.68) loses cached functions of structured types.
    place: int = _first_outside(
        jpeg_at,
        jpeg_ends.astype(np.uint64),
        records["jpeg_bytes"],
        records["tokens_at"],
        records["captions"],
        records["height"],
        records["width"],
        extent.beton_bytes,
        extent.tokens_bytes,
        extent.captions,
    )
    return place


@kernel()
def _first_outside(
    jpeg_at: NDArray[np.uint64],
    jpeg_ends: NDArray[np.uint64],
    jpeg_bytes: NDArray[np.uint32],
    tokens_at: NDArray[np.uint64],
    captions: NDArray[np.uint32],
    height: NDArray[np.uint32],
    width: NDArray[np.uint32],
    beton_bytes: int,
    tokens_bytes: int,
    max_captions: int,
) -> int:
    end, largest = np.uint64(beton_bytes), np.uint64(min(beton_bytes, PAGE_BYTES))
    for i in range(len(jpeg_at)):
        pixels, size = np.uint64(height[i]) * np.uint64(width[i]), np.uint64(jpeg_bytes[i])
        of_tokens = np.uint64(captions[i]) * np.uint64(tokens_bytes)
        if (
            pixels == 0
            or pixels > np.uint64(MAX_PIXELS)
            or size == 0
            or size > min(jpeg_ends[i], np.uint64(PAGE_BYTES))
            or of_tokens > largest
            # Never add: the sum of two such numbers can wrap around to an offset within the file.
            or jpeg_at[i] > jpeg_ends[i] - size
            or tokens_at[i] > end - of_tokens
            or captions[i] > max_captions
            or (captions[i] == 0) != (tokens_bytes == 0)
        ):
            return i
    return len(jpeg_at)


@kernel()
def _read(file: int, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> int:
    for i in range(len(rows)):
        if not read_at(file, (rows[i] + 1) * records.shape[1], records[i]):
            return i
    return _first_changed(records, rows)


@kernel()
def _first_changed(records: NDArray[np.uint8], rows: NDArray[np.int64]) -> int:
    """Return the index of the first of uint8 [k, 64] whose checksum does not match its row, else k."""
    for i in range(len(records)):
        if xxh64(records[i, :_SEALED], np.uint64(rows[i])) != records[i, _SEALED:].view(np.uint64)[0]:
            return i
    return len(records)


@kernel()
def _seal(records: NDArray[np.uint8]) -> None:
    for row in range(len(records)):
        records[row, _SEALED:].view(np.uint64)[0] = xxh64(records[row, :_SEALED], np.uint64(row))
