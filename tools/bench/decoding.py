"""What the CPU's loader spends on an image, by part, beside decoding alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ...pipeline.augment import RECIPES, ViewParameters, view_parameters
from ...pipeline.cores import cores
from ...pipeline.jpeg import decode
from ...pipeline.loading.pixels import add_noise, affine, gaussian_blur, recolour, store
from ...pipeline.loading.resample import resample_into
from ...pipeline.raw_bytes import read_at
from ...pipeline.rng import compiled
from ...pipeline.shard import Shard
from .work import WARM_UP, Serve, Work


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
    records, tars = shard.resolved(rows)
    files = {tar: shard.picture_file(tar) for tar in set(tars.tolist())}
    columns = (records[name].astype(np.int64) for name in ("jpeg_at", "jpeg_bytes", "height", "width"))
    damaged: int = _decode_rows(np.array([files[tar].number for tar in tars.tolist()]), *columns)
    return damaged


@compiled
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


def costs(work: Work, images: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds of one core that `ffcv` spends on an image, by part: the median of the rounds.

    Each part's own function runs alone over the same images, after a round of warm-up.
    """
    ids = np.arange(min(images, len(work.dataset.shard(0))))
    parts = _parts(work, ids)
    took: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(1 + rounds):
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            took[name].append(time.perf_counter() - began)
    return {name: 1e3 * median(seconds[1:]) / len(ids) for name, seconds in took.items()}


def _parts(work: Work, ids: NDArray[np.int64]) -> dict[str, Callable[[], object]]:
    shard, recipe, size = work.dataset.shard(0), RECIPES[work.recipe], work.image_size
    records = shard.records(ids)
    heights, widths = (records[name].astype(np.int64) for name in ("height", "width"))
    drawn = [view_parameters(recipe, 0, 0, ids, heights, widths, view) for view in range(work.views)]
    picture = np.random.default_rng(0).integers(256, size=(heights.max(), widths.max(), 3), dtype=np.uint8)
    view = np.zeros((3, size, size), np.float32)
    gain = offset = np.zeros(3, np.float32)

    def resize(of_view: ViewParameters, image: int) -> None:
        top, left, height, width = of_view.box[image].astype(np.float64)
        resample_into(view, picture, top, left, height, width, of_view.flip[image])

    def warp(of_view: ViewParameters, image: int) -> None:
        if recipe.has_affine:
            affine(view, of_view.affine[image])

    def colour(of_view: ViewParameters, image: int) -> None:
        if recipe.has_colour:
            recolour(view, of_view.colour[image], of_view.colour_mean[image])

    def blur(of_view: ViewParameters, image: int) -> None:
        if of_view.blur[image] > 0:
            gaussian_blur(view, of_view.blur[image])

    def noise(of_view: ViewParameters, image: int) -> None:
        if of_view.noise[image] > 0:
            add_noise(view, of_view.noise[image], of_view.noise_key[image])

    def every_view(part: Callable[[ViewParameters, int], None]) -> None:
        for image in range(len(ids)):
            for of_view in drawn:
                part(of_view, image)

    return {
        "decode": lambda: decode_rows(shard, ids),
        "resize": lambda: every_view(resize),
        "affine": lambda: every_view(warp),
        "colour": lambda: every_view(colour),
        "blur": lambda: every_view(blur),
        "noise": lambda: every_view(noise),
        "normalise": lambda: every_view(lambda of_view, image: store(view, view, gain, offset)),
    }
