"""FFCV's own table of rows in a .beton, without checksums, read back after a shard is written.

The layout is FFCV's, version 2: a header, a description of each field, one fixed-length line per row, pages of data,
and at the end the offset and length of every piece of data. It is not read with FFCV, whose import takes seconds and
350 MB, and which trusts the header.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DatasetError
from .raw_bytes import Descriptor
from .row_records import RECORD, Extent, first_outside

_VERSION = 2
_HEADER = np.dtype([("version", "<u2"), ("fields", "<u2"), ("page_size", "<u4"), ("rows", "<u8"), ("pieces_at", "<u8")])
_FIELD = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])
_IMAGE = [("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("jpeg_at", "<u8"), ("padding", "V3")]
_FIELDS = {
    ((2, b"image"), (1, b"source_index")): np.dtype([*_IMAGE, ("source_index", "<i8")]),
    ((2, b"image"), (4, b"tokens"), (1, b"source_index")): np.dtype(
        [*_IMAGE, ("tokens_at", "<u8"), ("source_index", "<i8")]
    ),
}
"""FFCV types and our names of a shard's fields -> dtype of a row's line."""
_JPEG_MODE = 0
_PIECE = np.dtype([("row", "<u8"), ("at", "<u8"), ("bytes", "<u8")])
_KEPT = ["jpeg_at", "jpeg_bytes", "tokens_at", "height", "width", "source_index"]


class FFCVTable:
    """The whole table of a shard, checked when opened: 36 bytes per row in memory."""

    def __init__(self, path: Path, file: Descriptor, rows: int, extent: Extent, further_pieces: int = 0) -> None:
        """Open the table of a .beton; it knows only the first of a row's captions.

        further_pieces: number of rows with a piece for their other captions.
        Raises DatasetError if the file has another number of rows, is incomplete or damaged.
        """
        unfinished = f"{path} is incomplete or damaged"
        (header,) = _items(file, 0, 1, _HEADER, f"{path} is not an FFCV file, or is cut short")
        fields, told, pieces_at = (int(header[name]) for name in ("fields", "rows", "pieces_at"))
        if header["version"] != _VERSION or not 2 <= fields <= 3:
            raise DatasetError(f"{path} is not an FFCV file written by `thermopile convert`")
        if told != rows:
            raise DatasetError(f"{path} holds {told:,} rows, but dataset.json says {rows:,}")
        described = _items(file, _HEADER.itemsize, fields, _FIELD, unfinished)
        line = _FIELDS.get(tuple(zip(described["type"].tolist(), described["name"].tolist(), strict=True)))
        if line is None or (fields == 3) != (extent.tokens_bytes > 0):
            raise DatasetError(f"{path} has other fields than dataset.json says, or its header is damaged")
        lines = _items(file, _HEADER.itemsize + fields * _FIELD.itemsize, rows, line, unfinished)
        pieces = _items(file, pieces_at, (fields - 1) * rows + further_pieces, _PIECE, unfinished)
        if not pieces_at or (lines["mode"] != _JPEG_MODE).any():
            raise DatasetError(unfinished)
        self._kept = np.empty(rows, [(name, RECORD[name]) for name in _KEPT])
        for name in self._kept.dtype.names or ():
            self._kept[name] = lines[name] if name in (line.names or ()) else 0
        lengths = _lengths(pieces, lines["jpeg_at"])
        if lengths is None or (lengths >> 32).any():
            raise DatasetError(unfinished)
        self._kept["jpeg_bytes"] = lengths
        if fields == 3:
            of_tokens = _lengths(pieces, lines["tokens_at"])
            if of_tokens is None or (of_tokens != extent.tokens_bytes * extent.captions).any():
                raise DatasetError(unfinished)
        self._captions = extent.captions
        records = np.empty(rows, RECORD)
        self.read(np.arange(rows), records)
        if (outside := first_outside(records, extent)) < rows:
            raise DatasetError(
                f"{path}: row {outside:,} does not lead to a picture within the file's "
                f"{extent.beton_bytes:,} bytes; it is damaged"
            )

    def read(self, rows: NDArray[np.int64], records: NDArray[np.void]) -> int:
        """Fill RECORD [k] with the records of these rows, int64 [k] within the shard, checksums 0. Returns k."""
        records[:] = 0
        for name in _KEPT:
            records[name] = self._kept[name][rows]
        records["captions"] = self._captions
        return len(rows)


def _items(file: Descriptor, at: int, count: int, dtype: np.dtype[Any], unfinished: str) -> NDArray[np.void]:
    """Read items from byte `at`. Raises DatasetError(unfinished) if the file ends before they do."""
    size = count * dtype.itemsize
    if at > file.bytes or size > file.bytes - at:  # before allocating the size that a damaged header claims
        raise DatasetError(unfinished)
    items = np.empty(count, dtype)
    if not file.read(at, items.view(np.uint8).reshape(-1)):
        raise DatasetError(unfinished)
    return items


def _lengths(pieces: NDArray[np.void], starts: NDArray[np.uint64]) -> NDArray[np.uint64] | None:
    """Return the bytes written at each start, uint64 [rows]; None if a start has no piece or pieces overlap."""
    by_start = np.argsort(pieces["at"])
    begins, lengths = pieces["at"][by_start], pieces["bytes"][by_start]
    place = np.minimum(np.searchsorted(begins, starts), len(begins) - 1)
    if (np.diff(begins) < lengths[:-1]).any() or not np.array_equal(begins[place], starts):
        return None
    return lengths[place]
