"""Write one shard's samples row by row in FFCV's file format (.beton).

FFCV's DatasetWriter does all file access, but its worker processes are not used: they hang when a sample raises. One
process writes a shard; conversions run in parallel over shards.
"""

import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numba.typed
import numpy as np
import torch
from numpy.typing import NDArray

from ..dataset.raw_bytes import writable
from ..dataset.row_records import IN_BETON, PAGE_BYTES, RECORD
from ..dataset.stored_sample import checksum

# Importing ffcv sets torch and numba to one thread for the whole process, and puts two constants into a typed dict,
# which numba compiles for five seconds; FFCV reads them from Python only, for which a plain dict will do.
_torch_threads, _numba_threads = torch.get_num_threads(), numba.get_num_threads()
_typed_dict, numba.typed.Dict = numba.typed.Dict, dict
# It also imports OpenCV, for an encoder that is not used here; if OpenCV is missing, an empty module replaces it.
_lacks_cv2 = find_spec("cv2") is None
if _lacks_cv2:
    sys.modules["cv2"] = ModuleType("cv2")

try:
    from ffcv.fields import IntField, NDArrayField, RGBImageField
    from ffcv.memory_allocator import MemoryAllocator
    from ffcv.types import FieldDescType, HeaderType
    from ffcv.writer import DatasetWriter, handle_sample
finally:
    if _lacks_cv2:
        del sys.modules["cv2"]
    numba.typed.Dict = _typed_dict
    torch.set_num_threads(_torch_threads)
    numba.set_num_threads(_numba_threads)

_TYPE_IDS = {"image": 2, "tokens": 4, "source_index": 1}
"""FFCV's ids of RGBImageField, NDArrayField and IntField."""


class BetonRow(NamedTuple):
    """One sample in its stored form."""

    jpeg: bytes
    height: int
    width: int
    tokens: NDArray[np.int32] | None
    """int32 [captions, L], or None in a dataset without captions."""
    source_index: int
    """The sample's index in the source listing, which traces pixels back to their origin."""
    tar_at: int | None = None
    """Offset in the tar that keeps the picture; None if it is stored."""


class JPEGField(RGBImageField):  # type: ignore[misc]
    """FFCV's image field for encoded JPEGs, whose bytes are stored unchanged, or stay in a tar."""

    def encode(self, destination: Any, image: BetonRow, malloc: Callable[[int], tuple[int, Any]]) -> None:
        destination["mode"] = 0  # JPEG
        destination["height"], destination["width"] = image.height, image.width
        stored = image.jpeg if image.tar_at is None else b"\0"  # FFCV's table has no row without bytes
        destination["data_ptr"], storage = malloc(len(stored))
        storage[:] = np.frombuffer(stored, np.uint8)


class CaptionsField(NDArrayField):  # type: ignore[misc]
    """FFCV's array field of the first caption's tokens, int32 [1, L]; a piece with the other captions' tokens follows.

    So a sample's captions are contiguous, of any number, and any FFCV can read the first.
    """

    def encode(self, destination: Any, tokens: NDArray[np.int32], malloc: Callable[[int], tuple[int, Any]]) -> None:
        super().encode(destination, tokens[:1], malloc)
        if len(tokens) > 1:
            # After the first: a sample that does not fit its page is written again from the start of the next page.
            _, storage = malloc(tokens[1:].nbytes)
            storage[:] = tokens[1:].reshape(-1).view(np.uint8)


def write_beton(
    path: Path, rows: Iterable[BetonRow], *, max_rows: int, context_length: int | None, in_place: bool = False
) -> NDArray[np.void]:
    """Write a shard of 1 to `max_rows` rows and return their RECORD [rows], not sealed.

    context_length: the length L of every caption's tokens; None omits the tokens field. in_place: pictures may stay in
    tars. The file is complete only when this returns, so write to a temporary name.
    """
    fields: dict[str, Any] = {"image": JPEGField(write_mode="jpg")}
    if context_length is not None:
        fields["tokens"] = CaptionsField(np.dtype("<i4"), (1, context_length))
    fields["source_index"] = IntField()
    ffcv: Any = DatasetWriter(str(path), fields, page_size=PAGE_BYTES, num_workers=1)
    ffcv.num_samples = max_rows
    ffcv.prepare()
    with path.open("r+b") as file:  # our fields get the ids of their base classes, so that any FFCV can read the file
        for number, name in enumerate(fields):
            file.seek(HeaderType.itemsize + number * FieldDescType.itemsize + FieldDescType.fields["type_id"][1])
            file.write(bytes([_TYPE_IDS[name]]))
    allocator = MemoryAllocator(str(path), ffcv.data_region_start, PAGE_BYTES)
    # Not in shared memory: an error's traceback would hold a view of it, so closing it would fail and hide the error.
    metadata: Any = np.zeros(max_rows, ffcv.metadata_type)
    names, tars, noted = ffcv.metadata_type.names, list[int](), list[tuple[int, ...]]()
    try:
        with allocator:
            for number, row in enumerate(rows):
                values = (row, row.source_index) if row.tokens is None else (row, row.tokens, row.source_index)
                handle_sample(values, number, names, metadata, allocator, fields)
                tars.append(-1 if row.tar_at is None else row.tar_at)
                tokens = np.empty(0, np.uint8) if row.tokens is None else row.tokens.reshape(-1).view(np.uint8)
                sums = checksum(writable(row.jpeg)), checksum(tokens) if len(tokens) else 0
                noted.append((len(row.jpeg), 0 if row.tokens is None else len(row.tokens), *map(int, sums)))
        np.frombuffer(ffcv.metadata_sm.buf, ffcv.metadata_type, count=max_rows)[:] = metadata
        ffcv.header["num_samples"] = len(noted)  # which may be fewer than were announced
        ffcv.finalize(allocator.allocations)
    finally:
        ffcv.metadata_sm.close()
        ffcv.metadata_sm.unlink()
    records = np.zeros(len(noted), RECORD)
    image, *of_tokens, records["source_index"] = (metadata[: len(noted)][name] for name in names)
    in_beton = image["data_ptr"] | (IN_BETON if in_place else np.uint64(0))
    records["jpeg_at"] = np.where(np.array(tars) < 0, in_beton, np.array(tars).astype(np.uint64))
    records["height"], records["width"] = image["height"], image["width"]
    records["tokens_at"] = of_tokens[0] if of_tokens else 0
    columns = zip(*noted, strict=True)
    for name, column in zip(("jpeg_bytes", "captions", "jpeg_checksum", "tokens_checksum"), columns, strict=True):
        records[name] = column
    return records
