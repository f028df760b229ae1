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
from ....pipeline.descriptor import read_at
from ....pipeline.ffcv_api import imdecode
from ....pipeline.shard import Shard
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
    records = shard.records(rows)
    columns = (records[name].astype(np.int64) for name in ("jpeg_at", "jpeg_bytes", "height", "width"))
    damaged: int = _decode_rows(shard.file.number, *columns)
    return damaged


@njit(nogil=True)  # not cached: numba cannot cache calls into a C library
def _decode_rows(
    file: int, at: NDArray[np.int64], size: NDArray[np.int64], height: NDArray[np.int64], width: NDArray[np.int64]
) -> int:
    picture, jpeg = np.empty(3 * (height * width).max(), np.uint8), np.empty(size.max(), np.uint8)
    damaged = 0
    for row in range(len(at)):
        damaged += not read_at(file, at[row], jpeg[: size[row]]) or imdecode(
            jpeg.ctypes.data, size[row], height[row], width[row], picture.ctypes.data, height[row], width[row],
            0, 0, 1, 1, False, False,
        ) != 0  # fmt: skip
    return damaged
