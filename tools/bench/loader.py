"""Measure what this machine can feed: images per second of both loaders and of the decoder alone, by part."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ...pipeline.augment import RECIPES, ViewParameters, view_parameters
from ...pipeline.conversion.convert import ConvertSettings, convert
from ...pipeline.cores import cores
from ...pipeline.dataset import Dataset
from ...pipeline.jpeg import decode
from ...pipeline.loading.ffcv_loader import FFCVLoader
from ...pipeline.loading.pixels import gaussian_blur, normalise, recolour
from ...pipeline.loading.resample import resample_into
from ...pipeline.order import Order
from ...pipeline.raw_bytes import read_at
from ...pipeline.rng import compiled
from ...pipeline.shard import Shard
from ...pipeline.sources.folder import FolderSource
from ..progress import progress_bar

HEIGHT, WIDTH = 300, 400
"""Size of the generated photographs, in pixels."""
QUALITY = 90
AHEAD = 2
"""Batches that a loader makes before they are asked for."""
WARM_UP = 4
"""Batches of a round that are not timed: they fill what a loader keeps ready."""


@dataclass(frozen=True)
class Work:
    """What is loaded, and as what."""

    dataset: Dataset
    order: Order
    recipe: str
    views: int
    image_size: int
    batches: int
    """Batches of a round that are timed."""

    @property
    def first_step(self) -> int:
        """Step of an epoch to start at, so that it ends with the round."""
        return self.order.steps_per_epoch - WARM_UP - self.batches

    @property
    def views_asked(self) -> dict[str, Any]:
        """Options of either loader."""
        recipe = RECIPES[self.recipe]
        return {"recipe": recipe, "image_size": self.image_size, "views": self.views, "ahead": AHEAD}


Serve = Callable[[int], Iterator[object]]
"""Round → that round's batches; nothing works on after the last one."""
Contender = Callable[[Work], AbstractContextManager[Serve]]


@contextmanager
def ffcv(work: Work) -> Iterator[Serve]:
    """Serve with the `ffcv` loader, on all cores."""
    with FFCVLoader(work.dataset, work.order, **work.views_asked) as loader:
        yield lambda number: loader.epoch(number, work.first_step)


@contextmanager
def dali(work: Work) -> Iterator[Serve]:
    """Serve with the `dali` loader, on the GPU if there is one."""
    from ...pipeline.loading.dali_loader import DALILoader  # it takes a second to import

    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    with DALILoader(work.dataset, work.order, device=device, **work.views_asked) as loader:
        yield lambda number: loader.epoch(number, work.first_step)


@contextmanager
def decode_only(work: Work) -> Iterator[Serve]:
    """Decode JPEGs of the first shard whole, once each, on all cores: no loader can be faster on a CPU."""
    shard = work.dataset.shard(0)
    with ThreadPoolExecutor(cores()) as pool:

        def decode(number: int) -> Iterator[object]:
            random = np.random.default_rng(number)
            for _ in range(WARM_UP + work.batches):
                rows = random.integers(len(shard), size=work.order.batch_size)
                yield list(pool.map(partial(decode_rows, shard), np.array_split(rows, cores())))

        yield decode


LOADERS: dict[str, Contender] = {"ffcv": ffcv, "dali": dali, "decode": decode_only}


def rates(contenders: Mapping[str, Contender], work: Work, rounds: int) -> dict[str, list[float]]:
    """Return each one's images per second, round by round; they take turns, after a round of warm-up."""
    torch.set_num_threads(1)  # as importing FFCV does; the others decode in threads of their own
    found: dict[str, list[float]] = {name: [] for name in contenders}
    with ExitStack() as opened, progress_bar("rounds", 1 + rounds) as bar:
        serves = {name: opened.enter_context(contender(work)) for name, contender in contenders.items()}
        for number in range(1 + rounds):
            for name, serve in serves.items():
                found[name].append(_images_per_second(serve(number), work))
            bar.update(number + 1)
    return {name: of_rounds[1:] for name, of_rounds in found.items()}


def _images_per_second(batches: Iterator[object], work: Work) -> float:
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(WARM_UP):
        next(batches)
    began = now()
    served = sum(1 for _ in batches)
    return served * work.order.batch_size / (now() - began)


def photographs(directory: Path, images: int) -> Dataset:
    """Write photographs to `directory`/files and convert them to `directory`/dataset, kept byte for byte."""
    folder = directory / "files"
    folder.mkdir()
    for number, jpeg in enumerate(jpegs(images)):
        (folder / f"{number:06d}.jpg").write_bytes(jpeg)
    convert(FolderSource(folder), directory / "dataset", ConvertSettings())
    return Dataset(directory / "dataset")


def jpegs(count: int) -> Iterator[bytes]:
    """Yield `count` different JPEG files of HEIGHT × WIDTH, the same each time: recoloured crops of two photographs."""
    from sklearn.datasets import load_sample_images

    originals = load_sample_images().images  # of 427 × 640 pixels: a flower, and a temple
    numbers = iter(range(count))
    with ThreadPoolExecutor(cores()) as pool:
        while some := list(islice(numbers, 256)):
            yield from pool.map(lambda number: _jpeg(originals[number % len(originals)], number), some)


def _jpeg(original: NDArray[np.uint8], number: int) -> bytes:
    random = np.random.default_rng(number)
    top, left = random.integers((original.shape[0] - HEIGHT + 1, original.shape[1] - WIDTH + 1)).tolist()
    picture = original[top : top + HEIGHT, left : left + WIDTH]
    if random.random() < 0.5:
        picture = picture[:, ::-1]
    recoloured = np.clip(picture * random.uniform(0.75, 1.1, size=3), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(recoloured).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def decode_rows(shard: Shard, rows: NDArray[np.int64]) -> int:
    """Read and decode these rows on this core. Return how many are damaged."""
    records = shard.records(rows)
    columns = (records[name].astype(np.int64) for name in ("jpeg_at", "jpeg_bytes", "height", "width"))
    damaged: int = _decode_rows(shard.file.number, *columns)
    return damaged


@compiled
def _decode_rows(
    file: int, at: NDArray[np.int64], size: NDArray[np.int64], height: NDArray[np.int64], width: NDArray[np.int64]
) -> int:
    picture, jpeg = np.empty(3 * (height * width).max(), np.uint8), np.empty(size.max(), np.uint8)
    damaged = 0
    for row in range(len(at)):
        memory = jpeg[: size[row]]
        damaged += not (read_at(file, at[row], memory) and decode(memory, height[row], width[row], picture, 1))
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

    def colour(of_view: ViewParameters, image: int) -> None:
        if recipe.has_colour:
            recolour(view, of_view.colour[image], of_view.colour_mean[image])

    def blur(of_view: ViewParameters, image: int) -> None:
        if of_view.blur[image] > 0:
            gaussian_blur(view, of_view.blur[image])

    def every_view(part: Callable[[ViewParameters, int], None]) -> None:
        for image in range(len(ids)):
            for of_view in drawn:
                part(of_view, image)

    return {
        "decode": lambda: decode_rows(shard, ids),
        "resize": lambda: every_view(resize),
        "colour": lambda: every_view(colour),
        "blur": lambda: every_view(blur),
        "normalise": lambda: every_view(lambda of_view, image: normalise(view, gain, offset)),
    }
