"""Decoding alone, the limit of what a CPU can load."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from thermopile.pipeline.cores import cores
from thermopile.pipeline.dataset.jpeg import decode
from thermopile.pipeline.dataset.raw_bytes import read_at
from thermopile.pipeline.dataset.shard import Shard
from thermopile.pipeline.dataset.stored_sample import Located
from thermopile.storage.kernels import kernel
from thermopile.tools.bench.loader import WARM_UP, Serve, Work


@contextmanager
def decode_alone(work: Work) -> Iterator[Serve]:
    """Decode JPEGs of the first shard whole, once each, on all cores: no loader can be faster on a CPU."""
    shard = work.dataset.shard(0)
    with ThreadPoolExecutor(cores()) as pool:

        def decode(number: int) -> Iterator[object]:
            random = np.random.default_rng(number)
            for _ in range(WARM_UP + work.batches):
                rows = random.integers(len(shard), size=work.order.batch_size)
                yield list(pool.map(partial(decode_rows, shard), np.array_split(rows, cores())))

        yield decode


def decode_rows(shard: Shard, rows: NDArray[np.int64]) -> int:
    """Read and decode these rows on this core. Return how many are damaged."""
    located, _files = shard.opened(Located.of(*shard.resolved(rows)), rows)
    at = located.jpeg_at.astype(np.int64)
    damaged: int = _decode_rows(located.jpeg_files, at, located.jpeg_bytes, located.height, located.width)
    return damaged


@kernel()
def _decode_rows(
    file: NDArray[np.int64],
    at: NDArray[np.int64],
    size: NDArray[np.int64],
    height: NDArray[np.int64],
    width: NDArray[np.int64],
) -> int:
    picture, jpeg = np.empty(3 * (height * width).max(), np.uint8), np.empty(size.max(), np.uint8)
    damaged = 0
    for row in range(len(at)):
        memory = jpeg[: size[row]]
        damaged += not (read_at(file[row], at[row], memory) and decode(memory, height[row], width[row], picture, 1))
    return damaged
