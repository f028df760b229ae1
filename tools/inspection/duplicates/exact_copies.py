"""Samples whose stored JPEG is the same, byte for byte, as that of an earlier sample, or has one colour."""

import hashlib
from collections.abc import Iterator
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ....pipeline.opening import Dataset
from .. import OnDone

_ROWS = 1 << 16
"""Records read at once."""
_BLANK_BYTES, _PIXELS_A_BYTE = 4096, 16
"""A larger JPEG, by a byte for so many pixels, is not of one colour, or full of metadata: it is not decoded."""
_BLANK_RANGE = 2
"""Levels of 255 between the darkest and the lightest pixel of one colour."""


def exact_copies(
    dataset: Dataset, on_progress: OnDone = lambda done, total: None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the samples that repeat an earlier one, ascending, and the first sample with these bytes, int64 [k] each.

    The checksums of the JPEGs are compared in memory, 40 bytes per sample; where two are equal, the pictures are read
    and their sha256 compared, since a checksum can be forged or collide. on_progress: called with the records read.
    Raises DatasetError, OSError.
    """
    keys = np.empty(dataset.n, np.uint64)
    for first, of_piece in checksums(dataset):
        keys[first : first + len(of_piece)] = of_piece
        on_progress(first + len(of_piece), dataset.n)
    _, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
    first_with, found = dict[bytes, int](), list[tuple[int, int]]()
    for sample_id in np.flatnonzero(counts[places] > 1).tolist():
        digest = hashlib.sha256(dataset.jpeg(sample_id)).digest()
        if (original := first_with.setdefault(digest, sample_id)) != sample_id:
            found.append((sample_id, original))
    copies, originals = np.array(found, np.int64).reshape(-1, 2).T
    return copies, originals


def checksums(dataset: Dataset) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """Yield the first id and the checksums of pieces of all samples."""
    for number in range(dataset.shards):
        dataset.files.bring_records(number)
        shard, first = dataset.shard(number), int(dataset.first_id[number])
        for row in range(0, len(shard), _ROWS):
            records = shard.records(np.arange(row, min(row + _ROWS, len(shard))))
            yield first + row, records["jpeg_checksum"]


def blank_pictures(dataset: Dataset, on_progress: OnDone = lambda done, total: None) -> NDArray[np.int64]:
    """Return the samples whose picture has one colour, ascending, int64 [k]. Raises DatasetError, OSError.

    on_progress: called with the samples done.
    """
    found = []
    for number, first in enumerate(dataset.first_id[:-1].tolist()):
        records = dataset.records(number)
        area = records["height"].astype(np.int64) * records["width"]
        small = np.flatnonzero(records["jpeg_bytes"] <= _BLANK_BYTES + area // _PIXELS_A_BYTE)
        for sample_id in (first + small).tolist():
            jpeg = dataset.jpeg(sample_id)
            # The draft lets the decoder skip detail, which may be a thin or small drawing.
            if _has_one_colour(jpeg, draft=True) and _has_one_colour(jpeg):
                found.append(sample_id)
            on_progress(sample_id, dataset.n)
        on_progress(first + len(records), dataset.n)
    return np.array(found, np.int64)


def _has_one_colour(jpeg: bytes, *, draft: bool = False) -> bool:
    with Image.open(BytesIO(jpeg), formats=["JPEG"]) as picture:
        if draft:
            picture.draft("RGB", (64, 64))
        return bool(np.ptp(np.asarray(picture.convert("RGB")), axis=(0, 1)).max() <= _BLANK_RANGE)
