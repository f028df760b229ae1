"""libjpeg-turbo alone: what no loader of the same files can surpass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ....pipeline.cores import cores
from ....pipeline.ffcv_api import imdecode
from ....pipeline.shard import Shard
from ....pipeline.stored_sample import SOUND, fetch_jpeg
from .cases import Case
from .material import Material
from .sizes import RateSizes


@contextmanager
def decode_only(material: Material, case: Case, sizes: RateSizes) -> Iterator[Callable[[int], Iterator[object]]]:
    """Decode the same JPEGs whole, once each, on all cores, and do nothing else."""
    shard = material.dataset.shard(0)
    with ThreadPoolExecutor(cores()) as pool:

        def decode_batch(rows: NDArray[np.int64]) -> int:
            parts = np.array_split(rows, cores())
            return sum(pool.map(partial(decode_rows, shard), parts))

        def decode(number: int) -> Iterator[object]:
            random = np.random.default_rng(number)
            for _ in range(sizes.warm_up + sizes.batches):
                yield decode_batch(random.integers(len(shard), size=sizes.batch))

        yield decode


def decode_rows(shard: Shard, rows: NDArray[np.int64]) -> int:
    """Read and decode these rows on this core, and compare nothing. Returns how many are damaged, which is 0 here."""
    damaged: int = _decode_rows(shard.file.number, shard.records(rows))
    return damaged


@njit(nogil=True)  # not cached: numba cannot cache calls into a C library
def _decode_rows(file: int, records: NDArray[np.void]) -> int:
    most_pixels, most_bytes, damaged = 0, 0, 0
    for row in range(len(records)):
        most_pixels = max(most_pixels, np.int64(records[row].height) * np.int64(records[row].width))
        most_bytes = max(most_bytes, np.int64(records[row].jpeg_bytes))
    picture, jpeg = np.empty(3 * most_pixels, np.uint8), np.empty(most_bytes, np.uint8)
    for row in range(len(records)):
        record = records[row]
        height, width = np.int64(record.height), np.int64(record.width)
        damaged += fetch_jpeg(file, record, False, jpeg) != SOUND or imdecode(
            jpeg.ctypes.data, record.jpeg_bytes, height, width, picture.ctypes.data, height, width,
            0, 0, 1, 1, False, False,
        ) != 0  # fmt: skip
    return damaged
