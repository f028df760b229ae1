"""libjpeg-turbo alone: what no loader of the same files can surpass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ....pipeline.beton import Beton
from ....pipeline.cores import cores
from ....pipeline.ffcv_api import imdecode
from .cases import Case
from .material import Material
from .sizes import RateSizes


@contextmanager
def decode_only(material: Material, case: Case, sizes: RateSizes) -> Iterator[Callable[[int], Iterator[object]]]:
    """Decode the same JPEGs whole, once each, on all cores, and do nothing else."""
    beton = material.dataset.beton(0)
    with ThreadPoolExecutor(cores()) as pool:

        def decode_batch(rows: NDArray[np.int64]) -> int:
            parts = np.array_split(rows, cores())
            return sum(pool.map(partial(decode_rows, beton), parts))

        def decode(number: int) -> Iterator[object]:
            random = np.random.default_rng(number)
            for _ in range(sizes.warm_up + sizes.batches):
                yield decode_batch(random.integers(len(beton), size=sizes.batch))

        yield decode


def decode_rows(beton: Beton, rows: NDArray[np.int64]) -> int:
    """Decode these rows on this core. Returns how many are damaged, which is 0 here."""
    damaged: int = _decode_rows(
        beton.jpeg_address[rows], beton.jpeg_bytes[rows], beton.heights[rows], beton.widths[rows]
    )
    return damaged


@njit(nogil=True)  # not cached: numba cannot cache calls into a C library
def _decode_rows(
    address: NDArray[np.uint64], size: NDArray[np.uint64], height: NDArray[np.int64], width: NDArray[np.int64]
) -> int:
    picture, damaged = np.empty(3 * (height * width).max(), np.uint8), 0
    for row in range(len(address)):
        damaged += imdecode(
            address[row], size[row], height[row], width[row], picture.ctypes.data, height[row], width[row],
            0, 0, 1, 1, False, False,
        ) != 0  # fmt: skip
    return damaged
