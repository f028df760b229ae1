"""The CPU loader: FFCV files and C decoders in the sample order, with one JPEG decode for all views of a sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from ..augment import Recipe, ViewParameters, view_key, view_parameters
from ..batch import Batch
from ..cores import cores
from ..dataset import Dataset
from ..errors import DatasetError
from ..ffcv_api import imdecode
from ..order import Order
from ..rng import compiled
from ..stored_sample import SOUND, UNDECODABLE
from .locate import Placed, Placer, fetch
from .pixels import gaussian_blur, normalise, recolour, solarise
from .resample import resample_into
from .view_memory import ViewMemory

Augmentation = Callable[[NDArray[np.float32], np.uint64], None]
"""A numba-compiled function that changes a view in place. It gets pixels, float32 [3, H, W] in 0 … 255, and the view's
key for `rng.uniform(key, draw)`; use draws from 1,000 on, since the recipe uses those below."""


class ViewMaker:
    """Makes the views of any samples. Batches may be kept: memory is reused only once nothing refers to it.

    Uses threads, not processes: the kernels release the GIL, so nothing is copied between processes or left behind.
    """

    def __init__(
        self, dataset: Dataset, *, seed: int = 0, recipe: Recipe, image_size: int, views: int,
        workers: int | None = None, spare: int = 1, augment: Augmentation | None = None,
    ) -> None:  # fmt: skip
        """Make views of a dataset of any size; a sample's views depend on seed, epoch, id and recipe.

        image_size: side of the square views, in pixels. views: 1 for pairs, 2 for images only.
        workers: decoding threads; None: one per core. spare: number of batches whose memory is kept for reuse.
        augment: custom augmentation, applied after the recipe's operations and before normalisation.
        """
        self.seed, self.recipe, self.image_size, self.views = seed, recipe, image_size, views
        self._workers, self._augment = workers or cores(), augment or _leave
        self._placer = Placer(dataset, self._workers)
        self._pool = ThreadPoolExecutor(self._workers, "thermopile-loader")
        self._memory = ViewMemory(spare)

    def make(self, sample_ids: NDArray[np.int64], epoch: int) -> Batch:
        """Return any samples as a batch with their views of that epoch; sample_ids int64 [b]."""
        return self._finish(*self._start(sample_ids, epoch))

    def close(self) -> None:
        """Stop the decoding threads after their current batch."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._memory = ViewMemory(spare=0)  # batches still in use return to the old pool and are freed with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, ids: NDArray[np.int64], epoch: int) -> tuple[Batch, list[Future[tuple[int, int]]]]:
        size = self.image_size
        pixels = self._memory.lend((self.views, len(ids), 3, size, size))
        placed = self._placer.place(ids)
        views = tuple(
            view_parameters(self.recipe, self.seed, epoch, ids, placed.height, placed.width, view)
            for view in range(self.views)
        )
        cuts, constants = np.linspace(0, len(ids), self._workers + 1).astype(int), self._constants(epoch)
        parts = [
            self._pool.submit(_make_part, self._placer, placed, views, low, high, pixels, *constants)
            for low, high in pairwise(cuts.tolist())
        ]
        tokens = torch.from_numpy(placed.tokens) if placed.vocab_size else None
        return Batch(torch.from_numpy(ids), tuple(torch.from_numpy(pixels)), tokens), parts

    def _constants(self, epoch: int) -> tuple[Any, ...]:
        std = np.array(self.recipe.std)
        gain, offset = (1 / (255 * std)).astype(np.float32), (-np.array(self.recipe.mean) / std).astype(np.float32)
        return self.recipe.has_colour, gain, offset, self._augment, np.uint64(self.seed), np.uint64(epoch)

    def _finish(self, batch: Batch, parts: list[Future[tuple[int, int]]]) -> Batch:
        for part in parts:
            row, fault = part.result()
            if fault:
                raise self._placer.damaged(int(batch.sample_ids[row]), fault)
        return batch


class FFCVLoader(ViewMaker):
    """Serves the batches of one rank in the sample order."""

    def __init__(
        self, dataset: Dataset, order: Order, *, recipe: Recipe, image_size: int, views: int,
        workers: int | None, ahead: int, rank: int, world: int, augment: Augmentation | None,
    ) -> None:  # fmt: skip
        super().__init__(
            dataset, seed=order.seed, recipe=recipe, image_size=image_size, views=views, workers=workers,
            spare=ahead + 2, augment=augment,  # those ahead, the one in use, the next one
        )  # fmt: skip
        self.order, self.rank, self.world, self._ahead = order, rank, world, ahead

    @classmethod
    def open(
        cls, dataset: Dataset, order: Order, *, recipe: Recipe, image_size: int, views: int,
        workers: int | None = None, ahead: int = 2, rank: int = 0, world: int = 1,
        augment: Augmentation | None = None,
    ) -> Self:  # fmt: skip
        """Open a loader.

        ahead: number of batches to prefetch. The other arguments are those of ViewMaker.
        Raises DatasetError if the order was made for another number of samples.
        """
        if order.samples != dataset.n:
            raise DatasetError(f"the order is for {order.samples:,} samples, but {dataset.path} holds {dataset.n:,}")
        return cls(
            dataset, order, recipe=recipe, image_size=image_size, views=views, workers=workers,
            ahead=ahead, rank=rank, world=world, augment=augment,
        )  # fmt: skip

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from first_step on.

        A damaged sample raises DatasetError at the batch that contains it.
        """
        under_way: deque[tuple[Batch, list[Future[tuple[int, int]]]]] = deque()
        try:
            for step in range(first_step, self.order.steps_per_epoch):
                ids = self.order.batch_ids(epoch, step, self.rank, self.world)
                under_way.append(self._start(ids, epoch))
                if len(under_way) > self._ahead:
                    yield self._finish(*under_way.popleft())
            while under_way:
                yield self._finish(*under_way.popleft())
        finally:
            for _, parts in under_way:
                for part in parts:
                    part.cancel()


def _make_part(
    placer: Placer, placed: Placed, views: tuple[ViewParameters, ...], low: int, high: int, *of_batch: Any
) -> tuple[int, int]:
    """Make rows low … high - 1 like `_make_rows`, with few files open at a time."""
    for start, end in placer.runs(placed, low, high):
        row, fault = _make_rows(placed, views, start, end, *of_batch)
        if fault:
            return row, fault
    return high, SOUND


@compiled
def _leave(view: NDArray[np.float32], key: np.uint64) -> None:
    """The default augmentation, which does nothing."""


@njit(nogil=True)  # not cached: numba cannot cache calls into a C library
def _make_rows(
    placed: Placed, views: tuple[ViewParameters, ...], low: int, high: int, out: NDArray[np.float32],
    recolours: bool, gain: NDArray[np.float32], offset: NDArray[np.float32],
    augment: Augmentation, seed: np.uint64, epoch: np.uint64,
) -> tuple[int, int]:  # fmt: skip
    """Fill out[view, row] and the tokens for rows low … high - 1.

    Returns the first damaged row and its fault, or (high, SOUND).
    """
    memory, jpeg = np.empty(0, np.uint8), np.empty(placed.jpeg_bytes[low:high].max(), np.uint8)
    for row in range(low, high):
        fault = fetch(placed, row, jpeg)
        if fault != SOUND:
            return row, fault
        reduced = _reduction(views, row, out.shape[3])
        height, width = -(-placed.height[row] // reduced), -(-placed.width[row] // reduced)
        if len(memory) < 3 * height * width:  # the JPEG's header confirms them
            memory = np.empty(3 * height * width, np.uint8)
        if imdecode(jpeg.ctypes.data, placed.jpeg_bytes[row], placed.height[row], placed.width[row], memory.ctypes.data,
                    placed.height[row], placed.width[row], 0, 0, 1, reduced, False, False) != 0:  # fmt: skip
            return row, UNDECODABLE
        picture = memory[: 3 * height * width].reshape(height, width, 3)
        for view in range(len(views)):
            drawn, pixels = views[view], out[view, row]
            top, left, h, w = drawn.box[row] / reduced
            resample_into(pixels, picture, top, left, h, w, drawn.flip[row])
            if recolours:
                recolour(pixels, drawn.colour[row], drawn.colour_mean[row])
            if drawn.blur[row] > 0:
                gaussian_blur(pixels, drawn.blur[row])
            if drawn.solarise[row]:
                solarise(pixels)
            augment(pixels, view_key(seed, epoch, np.uint64(placed.sample_ids[row]), np.uint64(view)))
            normalise(pixels, gain, offset)
    return high, SOUND


@njit(nogil=True)
def _reduction(views: tuple[ViewParameters, ...], row: int, size: int) -> int:
    """Return the decoder's reduction, 1, 2, 4 or 8: the largest that keeps every crop at least as large as its view."""
    shortest = 1 << 30
    for view in range(len(views)):
        shortest = min(shortest, views[view].box[row, 2], views[view].box[row, 3])
    reduced = 1
    while reduced < 8 and shortest >= 2 * reduced * size:
        reduced *= 2
    return reduced
