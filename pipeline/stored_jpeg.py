"""One picture of a shard, read without FFCV: to import that takes seconds and 350 MB, to open a shard its whole table.

The file's layout is FFCV's, version 2: a header, a description of each field, a line of fixed length for every row,
pages of data, and at the end, for every piece of data, where it starts and how long it is. `beton.py` has whole shards.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .errors import DatasetError

_VERSION = 2
_HEADER = np.dtype([("version", "<u2"), ("fields", "<u2"), ("page_size", "<u4"), ("rows", "<u8"), ("pieces_at", "<u8")])
_FIELD_BYTES = 1 + 16 + 1024
"""Of a field's description: its type, its name, its arguments."""
_IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("at", "<u8"), ("padding", "V3")])
"""The first field of a row; each of the others has 8 bytes."""
_PIECE = np.dtype([("row", "<u8"), ("at", "<u8"), ("bytes", "<u8")])


def read_jpeg(path: Path, row: int, rows: int) -> bytes:
    """The JPEG of a row, 0 … rows - 1, as it is stored; `rows`: how many the shard at `path` must hold.

    Raises DatasetError where it holds another number, was not written to its end, or is damaged; OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _read(file, 0, _HEADER)
        if not len(header) or header["version"][0] != _VERSION:
            raise DatasetError(f"{path} is not a readable FFCV file. Convert the dataset again.")
        fields, found, pieces_at = (int(header[name][0]) for name in ("fields", "rows", "pieces_at"))
        if found != rows:
            raise DatasetError(
                f"{path} holds {found:,} rows, but dataset.json says {rows:,}. Convert the dataset again."
            )
        line_bytes = _IMAGE.itemsize + 8 * (fields - 1)
        image = _read(file, _HEADER.itemsize + fields * _FIELD_BYTES + row * line_bytes, _IMAGE)
        pieces = _read(file, min(pieces_at, size), _PIECE, (size - min(pieces_at, size)) // _PIECE.itemsize)
        lengths = pieces["bytes"][np.isin(pieces["at"], image["at"])].tolist()
        if not pieces_at or len(lengths) != 1 or (at := int(image["at"][0])) + lengths[0] > size:
            raise DatasetError(f"{path} was not written to its end, or is damaged. Convert the dataset again.")
        return os.pread(file.fileno(), lengths[0], at)


def _read(file: BinaryIO, at: int, dtype: np.dtype[Any], count: int = 1) -> NDArray[Any]:
    """So many items from byte `at` on, fewer where the file ends."""
    data = os.pread(file.fileno(), count * dtype.itemsize, at)
    return np.frombuffer(data, dtype, len(data) // dtype.itemsize)
