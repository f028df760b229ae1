"""One shard's samples in FFCV's file format (.beton): written row by row, read through a memory map.

FFCV's own DatasetWriter is used for everything that touches the file, but not its worker processes: they wait for ever
when a sample raises. A shard is written by one process; conversions run in parallel over shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import DatasetError
from .ffcv_api import (
    MIN_PAGE_SIZE,
    DatasetWriter,
    FieldDescType,
    HeaderType,
    IntField,
    MemoryAllocator,
    NDArrayField,
    Reader,
    RGBImageField,
    handle_sample,
)

PAGE_SIZE: int = MIN_PAGE_SIZE
MAX_JPEG_BYTES: int = PAGE_SIZE - (1 << 16)
"""A sample must fit one page of the file: this leaves room for its tokens."""

_RGB_IMAGE_TYPE_ID = 2
_JPEG_MODE = 0


class BetonRow(NamedTuple):
    """One sample, as the shard stores it."""

    jpeg: bytes
    height: int
    width: int
    tokens: NDArray[np.int32] | None
    """int32 [L], or None in a dataset without captions."""
    source_index: int
    """The sample's place in the source listing, by which pixels can be traced back to their origin."""


class JPEGField(RGBImageField):  # type: ignore[misc]
    """FFCV's image field, for an image that is a JPEG already: its bytes are stored as they are."""

    def encode(self, destination: Any, image: BetonRow, malloc: Callable[[int], tuple[int, Any]]) -> None:
        destination["mode"] = _JPEG_MODE
        destination["height"], destination["width"] = image.height, image.width
        destination["data_ptr"], storage = malloc(len(image.jpeg))
        storage[:] = np.frombuffer(image.jpeg, np.uint8)


class _ShardWriter(DatasetWriter):  # type: ignore[misc]
    """FFCV's writer in this process alone; the number of rows may turn out smaller than what was asked for."""

    def write(self, rows: Iterable[BetonRow], most_rows: int) -> int:
        self.num_samples = most_rows
        self.prepare()
        self._name_image_field_as_ffcv_does()
        allocator = MemoryAllocator(self.fname, self.data_region_start, self.page_size)
        # Apart from the shared memory: an error's traceback would hold a view of that, which could not be closed then,
        # and the error would be lost.
        metadata: Any = np.zeros(most_rows, self.metadata_type)
        written = 0
        try:
            with allocator:
                for row in rows:
                    values = (row, row.source_index) if row.tokens is None else (row, row.tokens, row.source_index)
                    handle_sample(values, written, self.metadata_type.names, metadata, allocator, self.fields)
                    written += 1
            np.frombuffer(self.metadata_sm.buf, self.metadata_type, count=most_rows)[:] = metadata
            self.header["num_samples"] = written
            self.finalize(allocator.allocations)
        finally:
            self.metadata_sm.close()
            self.metadata_sm.unlink()
        return written

    def _name_image_field_as_ffcv_does(self) -> None:
        """Give JPEGField the type id of the class it specialises, so that any FFCV reads the file."""
        with open(self.fname, "r+b") as file:
            file.seek(HeaderType.itemsize + FieldDescType.fields["type_id"][1])
            file.write(bytes([_RGB_IMAGE_TYPE_ID]))


def write_beton(path: Path, rows: Iterable[BetonRow], *, most_rows: int, context_length: int | None) -> int:
    """Write a shard and return its number of rows, at most `most_rows`.

    context_length is the length L of every row's tokens; None writes no tokens field. The file is whole only when
    this returns: write to a temporary name.
    """
    fields: dict[str, Any] = {"image": JPEGField(write_mode="jpg")}
    if context_length is not None:
        fields["tokens"] = NDArrayField(np.dtype("<i4"), (context_length,))
    fields["source_index"] = IntField()
    return _ShardWriter(str(path), fields, page_size=PAGE_SIZE, num_workers=1).write(rows, most_rows)


class Beton:
    """A shard opened for reading: where each row's JPEG and tokens lie in memory."""

    def __init__(self, path: Path) -> None:
        try:
            reader = Reader(str(path))
        except (OSError, ValueError, AssertionError, IndexError) as error:
            raise DatasetError(f"{path} is not a readable FFCV file: {error}. Convert the dataset again.") from error
        columns = (reader.metadata[column] for column in reader.metadata_type.names)
        metadata = dict(zip(reader.field_names, columns, strict=True))
        image = metadata["image"]
        self._map = np.memmap(path, dtype=np.uint8, mode="r")
        base = np.uint64(self._map.ctypes.data)
        self.jpeg_bytes: NDArray[np.uint64] = _allocated_bytes(path, reader, image["data_ptr"])
        """uint64 [rows]: length of each JPEG in bytes."""
        self._check_extent(path, image["data_ptr"] + self.jpeg_bytes)
        self.jpeg_address: NDArray[np.uint64] = image["data_ptr"] + base
        """uint64 [rows]: where each JPEG starts in this process's memory; valid while this object lives."""
        self.heights: NDArray[np.int64] = image["height"].astype(np.int64)
        self.widths: NDArray[np.int64] = image["width"].astype(np.int64)
        self.source_index: NDArray[np.int64] = metadata["source_index"].astype(np.int64)
        self.context_length: int | None = None
        self._tokens_at: NDArray[np.uint64] = np.zeros(len(image), np.uint64)
        if "tokens" in metadata:
            (self.context_length,) = (int(length) for length in reader.handlers["tokens"].shape)
            self._tokens_at = metadata["tokens"]
            self._check_extent(path, self._tokens_at + np.uint64(4 * self.context_length))

    def __len__(self) -> int:
        return len(self.heights)

    def _check_extent(self, path: Path, ends: NDArray[np.uint64]) -> None:
        """Addresses go to C code unchecked, so a damaged table must be found here."""
        if len(ends) and int(ends.max()) > self._map.size:
            raise DatasetError(
                f"{path}: a row ends at byte {int(ends.max()):,} of a file of {self._map.size:,}; "
                "the file is cut short or damaged. Convert the dataset again."
            )

    def jpeg(self, row: int) -> bytes:
        """The JPEG of one row."""
        start = int(self.jpeg_address[row]) - self._map.ctypes.data
        return self._map[start : start + int(self.jpeg_bytes[row])].tobytes()

    def tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32 [len(rows), L]; only where the shard has tokens."""
        offsets = self._tokens_at[rows][:, None] + np.arange(4 * (self.context_length or 0), dtype=np.uint64)
        tokens: NDArray[np.int32] = self._map[offsets].view(np.int32)
        return tokens


def _allocated_bytes(path: Path, reader: Reader, pointers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """How many bytes were written at each pointer, uint64 [rows]; the allocation table, written last, knows."""
    table = reader.alloc_table[np.argsort(reader.alloc_table["ptr"])]
    place = np.searchsorted(table["ptr"], pointers)
    unfinished = reader.header["alloc_table_ptr"] == 0 or (place == len(table)).any()
    if unfinished or (table["ptr"][place] != pointers).any():
        raise DatasetError(f"{path} was not written to its end, or is damaged. Convert the dataset again.")
    sizes: NDArray[np.uint64] = table["size"][place]
    return sizes
