"""Write one shard's samples row by row in FFCV's file format (.beton), version 2.

A header, a description of each field, a row of metadata for each sample, pieces of data in pages, which no sample
crosses, and a table of the pieces. FFCV's own writer writes the same bytes, but its processes hang when a sample
raises, and its import takes seconds, needs OpenCV and sets torch and numba to one thread.
"""

import json
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...storage.arrays import Int32s, Records
from ..dataset.raw_bytes import writable
from ..dataset.row_records import IN_BETON, PAGE_BYTES, RECORD
from ..dataset.stored_sample import checksum

_HEADER = np.dtype([("version", "<u2"), ("fields", "<u2"), ("page", "<u4"), ("rows", "<u8"), ("pieces_at", "<u8")])
_FIELD = np.dtype([("kind", "u1"), ("name", "S16"), ("arguments", "S1024")])
_PIECE = np.dtype([("row", "<u8"), ("at", "<u8"), ("bytes", "<u8")])
_IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("at", "<u8")])
_KINDS: dict[str, tuple[int, Any]] = {"image": (2, _IMAGE), "tokens": (4, "<u8"), "source_index": (1, "<i8")}
"""FFCV's ids of RGBImageField, NDArrayField and IntField, and what a row has of each."""
_JPEG = 0
"""FFCV's mode of an encoded picture."""


class BetonRow(NamedTuple):
    """One sample in its stored form."""

    jpeg: bytes
    height: int
    width: int
    tokens: Int32s | None
    """int32 [captions, L], or None in a dataset without captions."""
    source_index: int
    """The sample's index in the source listing, which traces pixels back to their origin."""
    tar_at: int | None = None
    """Offset in the tar that keeps the picture; None if it is stored."""


def write_beton(
    path: Path, rows: Iterable[BetonRow], *, max_rows: int, context_length: int | None, in_place: bool = False
) -> Records:
    """Write a shard of 1 to `max_rows` rows, none larger than a page, and return their RECORD [rows], not sealed.

    context_length: the length L of every caption's tokens; None omits the tokens field. in_place: pictures may stay in
    tars. The file is complete only when this returns, so write to a temporary name.
    """
    names = [name for name in _KINDS if name != "tokens" or context_length is not None]
    metadata: Any = np.zeros(max_rows, np.dtype([(name, _KINDS[name][1]) for name in names], align=True))
    fields = np.array([(_KINDS[name][0], name, _arguments(name, context_length)) for name in names], _FIELD)
    end = _next_page(_HEADER.itemsize + fields.nbytes + metadata.nbytes)
    pieces, records = list[tuple[int, int, int]](), np.zeros(max_rows, RECORD)
    with path.open("wb") as file:
        for number, row in enumerate(rows):
            jpeg = row.jpeg if row.tar_at is None else b"\0"  # FFCV's table has no row without bytes
            tokens = np.empty((0, 0), np.int32) if row.tokens is None else row.tokens
            # FFCV reads the first caption. The others follow, of any number.
            data = [part for part in (jpeg, tokens[:1].tobytes(), tokens[1:].tobytes()) if part]
            ends = [*accumulate(map(len, data))]
            file.seek(end)
            if (left := _next_page(end) - end) < ends[-1]:
                # What fits the page stays in it, since FFCV's writer notices only then that a sample does not.
                file.write(b"".join(data[: sum(each <= left for each in ends)]))
                file.seek(end := end + left)
            at = end
            for part in data:
                pieces.append((number, end, len(part)))
                end += file.write(part)
            tokens_at = at + len(jpeg) if tokens.size else 0
            image = _JPEG, row.width, row.height, at
            values = {"image": image, "tokens": tokens_at, "source_index": row.source_index}
            metadata[number] = tuple(values[name] for name in names)
            stored_at = at | int(IN_BETON) if in_place else at
            jpeg_at = stored_at if row.tar_at is None else row.tar_at
            sums = checksum(writable(row.jpeg)), checksum(tokens.reshape(-1).view(np.uint8)) if tokens.size else 0
            record = records[number]
            record["jpeg_at"], record["jpeg_bytes"], record["jpeg_checksum"] = jpeg_at, len(row.jpeg), sums[0]
            record["tokens_at"], record["captions"], record["tokens_checksum"] = tokens_at, len(tokens), sums[1]
            record["height"], record["width"], record["source_index"] = row.height, row.width, row.source_index
        count, end = pieces[-1][0] + 1, _next_page(end)
        file.seek(end)
        file.write(np.array(pieces, _PIECE).tobytes())
        file.seek(0)
        header = np.array((2, len(fields), PAGE_BYTES, count, end), _HEADER)  # maybe fewer rows than were announced
        file.write(header.tobytes() + fields.tobytes() + metadata.tobytes())
    return records[:count]


def _next_page(at: int) -> int:
    """Return where the page ends in which `at` lies; at a border, `at` itself."""
    return -(-at // PAGE_BYTES) * PAGE_BYTES


def _arguments(name: str, context_length: int | None) -> bytes:
    """Return FFCV's description of a field: of an array its shape, in up to 32 dimensions, and its type as JSON."""
    kind = json.dumps([["", "<i4"]]).encode()
    shape = np.array([1, context_length or 0, *[0] * 30, len(kind)], "<u8")
    return shape.tobytes() + kind if name == "tokens" else b""
