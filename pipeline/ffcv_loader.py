"""The CPU loader: FFCV's files and C decoders, driven by our order, one JPEG decode for all views of a sample."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from .augment import Recipe, crop_box, is_flipped, normalise_into, view_key
from .batch import Batch
from .dataset import Dataset
from .errors import DatasetError
from .ffcv_api import imdecode, resize
from .order import Order


class Placed(NamedTuple):
    """Where the rows of a batch lie in memory; each array [b]."""

    sample_ids: NDArray[np.int64]
    address: NDArray[np.uint64]
    size: NDArray[np.uint64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]


class FFCVLoader:
    """Serves the batches of one rank. Batches are fresh tensors: they may be kept.

    Threads, not processes: the kernels hold no lock, so that nothing is copied between processes or left behind.
    """

    def __init__(
        self, dataset: Dataset, order: Order, *, recipe: Recipe, image_size: int, views: int,
        workers: int, ahead: int, rank: int, world: int,
    ) -> None:  # fmt: skip
        self.dataset, self.order, self.recipe = dataset, order, recipe
        self.image_size, self.views, self.rank, self.world = image_size, views, rank, world
        self._shards = [dataset.beton(shard) for shard in range(dataset.shards)]
        self._ahead = ahead
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "thermopile-loader")

    @classmethod
    def open(
        cls, dataset: Dataset, order: Order, *, recipe: Recipe, image_size: int, views: int,
        workers: int | None = None, ahead: int = 2, rank: int = 0, world: int = 1,
    ) -> Self:  # fmt: skip
        """Open a loader.

        image_size: side of the square views, in pixels. views: 1 for pairs, 2 for images alone.
        workers: decoding threads; all cores where None. ahead: batches made before they are asked for.
        Raises DatasetError where the order was made for another number of samples.
        """
        if order.samples != dataset.n:
            raise DatasetError(f"the order is for {order.samples:,} samples, but {dataset.path} holds {dataset.n:,}")
        return cls(dataset, order, recipe=recipe, image_size=image_size, views=views,
                   workers=workers or os.cpu_count() or 1, ahead=ahead, rank=rank, world=world)  # fmt: skip

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from first_step on.

        A sample that does not decode raises DatasetError at the batch that holds it.
        """
        under_way: deque[tuple[Batch, list[Future[int]]]] = deque()
        try:
            for step in range(first_step, self.order.steps_per_epoch):
                under_way.append(self._start(epoch, step))
                if len(under_way) > self._ahead:
                    yield self._finish(*under_way.popleft())
            while under_way:
                yield self._finish(*under_way.popleft())
        finally:
            for _, parts in under_way:
                for part in parts:
                    part.cancel()

    def close(self) -> None:
        """Stop the decoding threads; waits for the batch they are at."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, epoch: int, step: int) -> tuple[Batch, list[Future[int]]]:
        ids = self.order.batch_ids(epoch, step, self.rank, self.world)
        size = self.image_size
        pixels = torch.empty((self.views, len(ids), 3, size, size), dtype=torch.float32)
        placed, tokens = self._place(ids)
        cuts = np.linspace(0, len(ids), self._workers + 1).astype(int)
        parts = [
            self._pool.submit(_decode_rows, placed, low, high, pixels.numpy(), *self._recipe_arguments(epoch))
            for low, high in pairwise(cuts.tolist())
        ]
        return Batch(torch.from_numpy(ids), tuple(pixels), tokens), parts

    def _recipe_arguments(self, epoch: int) -> tuple[Any, ...]:
        std = np.array(self.recipe.std)
        gain = (1 / (255 * std)).astype(np.float32)
        offset = (-np.array(self.recipe.mean) / std).astype(np.float32)
        key = (np.uint64(self.order.seed), np.uint64(epoch))
        return (*key, self.recipe.scale, self.recipe.ratio, self.recipe.flip, gain, offset)

    def _place(self, ids: NDArray[np.int64]) -> tuple[Placed, torch.Tensor | None]:
        shards, rows = self.dataset.locate(ids)
        placed = Placed(ids, np.empty(len(ids), np.uint64), np.empty(len(ids), np.uint64),
                        np.empty(len(ids), np.int64), np.empty(len(ids), np.int64))  # fmt: skip
        info = self.dataset.index.tokenizer
        tokens = np.empty((len(ids), info.context_length), np.int32) if info else None
        for shard in np.unique(shards):
            beton, at = self._shards[shard], np.flatnonzero(shards == shard)
            placed.address[at] = beton.jpeg_address[rows[at]]
            placed.size[at] = beton.jpeg_bytes[rows[at]]
            placed.height[at], placed.width[at] = beton.heights[rows[at]], beton.widths[rows[at]]
            if tokens is not None:
                tokens[at] = beton.tokens(rows[at])
        return placed, None if tokens is None else torch.from_numpy(tokens)

    def _finish(self, batch: Batch, parts: list[Future[int]]) -> Batch:
        for part in parts:
            if (row := part.result()) >= 0:
                sample_id = int(batch.sample_ids[row])
                shard, place = (int(at[0]) for at in self.dataset.locate(np.array([sample_id])))
                raise DatasetError(
                    f"sample {sample_id} (row {place} of shard {shard} of {self.dataset.path}) does not "
                    "decode: the file was damaged after its conversion. Convert the dataset again."
                )
        return batch


@njit(nogil=True)  # not cached: numba cannot cache calls into a C library
def _decode_rows(
    placed: Placed, low: int, high: int, out: NDArray[np.float32],
    seed: np.uint64, epoch: np.uint64, scale: tuple[float, float], ratio: tuple[float, float], flip: float,
    gain: NDArray[np.float32], offset: NDArray[np.float32],
) -> int:  # fmt: skip
    """Fill out[view, row] for rows low … high - 1. Returns the first row whose JPEG does not decode, or -1."""
    size = out.shape[3]
    most_pixels = 0
    for row in range(low, high):
        most_pixels = max(most_pixels, placed.height[row] * placed.width[row])
    picture, crop = np.empty(3 * most_pixels, np.uint8), np.empty((size, size, 3), np.uint8)
    for row in range(low, high):
        height, width = placed.height[row], placed.width[row]
        if imdecode(placed.address[row], placed.size[row], height, width, picture.ctypes.data,
                    height, width, 0, 0, 1, 1, False, False) != 0:  # fmt: skip
            return row
        for view in range(out.shape[0]):
            key = view_key(seed, epoch, np.uint64(placed.sample_ids[row]), np.uint64(view))
            top, left, h, w = crop_box(key, height, width, scale, ratio)
            resize(0, picture.ctypes.data, height, width, top, top + h, left, left + w, crop.ctypes.data, size, size)
            normalise_into(out[view, row], crop, is_flipped(key, flip), gain, offset)
    return -1
