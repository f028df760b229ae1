"""torch's DataLoader with Pillow, as it is written everywhere: worker processes that read, decode and augment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from thermopile.pipeline.cores import cores
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES, Recipe, ViewParameters, view_parameters
from thermopile.tools.bench.loader import AHEAD, WARM_UP, Serve, Work

from .photographs import HEIGHT, WIDTH


@contextmanager
def pillow(work: Work) -> Iterator[Serve]:
    """Serve the same samples with the same crops, flips and blurs as our loaders, and jitter of the same distribution.

    The processes are started once, and wait while others have their turn.
    """
    folder = work.dataset.path.with_name("files")
    files = [folder / key for key in work.dataset.column("key").to_pylist()]
    views = PillowViews(files, work.recipe, work.views, work.image_size)
    batches = _Batches(work.order, WARM_UP + work.batches)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
        views, batch_sampler=batches, num_workers=cores(), prefetch_factor=AHEAD, persistent_workers=True,
        multiprocessing_context="spawn",  # a fork would take over locks of this process's threads
    )  # fmt: skip

    def serve(number: int) -> Iterator[object]:
        batches.epoch = number
        return iter(loader)

    yield serve


class _Batches:
    """Batches of (epoch, sample id): the last few steps of an epoch."""

    def __init__(self, order: Order, steps: int) -> None:
        self.epoch, self._order, self._steps = 0, order, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self._order.steps_per_epoch - self._steps, self._order.steps_per_epoch):
            yield [(self.epoch, sample_id) for sample_id in self._order.batch_ids(self.epoch, step).tolist()]


class PillowViews(Dataset[tuple[Tensor, ...]]):
    """The views of a sample, float32 [3, size, size] each."""

    def __init__(self, files: list[Path], recipe: str, views: int, image_size: int) -> None:
        self._files, self._recipe, self._views, self._size = files, RECIPES[recipe], views, image_size

    def __getitems__(self, wanted: list[tuple[int, int]]) -> list[tuple[Tensor, ...]]:
        """A batch at once, which DataLoader asks for where there is this method: parameters are drawn together."""
        epoch, sample_ids = wanted[0][0], np.array([sample_id for _, sample_id in wanted])
        heights, widths = np.full(len(wanted), HEIGHT), np.full(len(wanted), WIDTH)
        drawn = [
            view_parameters(self._recipe, 0, epoch, sample_ids, heights, widths, view) for view in range(self._views)
        ]
        random = np.random.default_rng((epoch, sample_ids[0]))
        return [self._sample(place, int(sample_id), drawn, random) for place, sample_id in enumerate(sample_ids)]

    def _sample(
        self, place: int, sample_id: int, drawn: list[ViewParameters], random: np.random.Generator
    ) -> tuple[Tensor, ...]:
        with Image.open(self._files[sample_id]) as file:
            picture = file.convert("RGB")
        return tuple(
            _normalised(_augmented(picture, parameters, place, self._recipe, self._size, random), self._recipe)
            for parameters in drawn
        )


def _augmented(
    picture: Image.Image, drawn: ViewParameters, place: int, recipe: Recipe, size: int, random: np.random.Generator
) -> Image.Image:
    """One view of a picture, whose parameters are at `place` of `drawn`."""
    view = cropped(picture, drawn.box[place], size)
    if drawn.flip[place]:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if recipe.has_colour:
        view = _recoloured(view, recipe, random)
    if drawn.blur[place] > 0:
        view = view.filter(ImageFilter.GaussianBlur(float(drawn.blur[place])))
    return ImageOps.solarize(view) if drawn.solarise[place] else view


def cropped(picture: Image.Image, box: NDArray[np.int64], size: int) -> Image.Image:
    """A box (top, left, height, width) of a picture, reduced or enlarged with Pillow's antialiased filter."""
    top, left, height, width = box.tolist()
    return picture.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + width, top + height))


def _recoloured(view: Image.Image, recipe: Recipe, random: np.random.Generator) -> Image.Image:
    """Jitter in an order drawn each time, then grayscale: torchvision's operations on Pillow's pictures."""
    if random.random() < recipe.jitter:
        strengths = (recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)
        for operation in random.permutation(4).tolist():
            by = random.uniform(-1, 1) * strengths[operation]
            view = _turned(view, by) if operation == 3 else _ENHANCERS[operation](view).enhance(max(0.0, 1 + by))
    if random.random() < recipe.grayscale:
        view = view.convert("L").convert("RGB")
    return view


_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def _turned(view: Image.Image, turns: float) -> Image.Image:
    hue, saturation, value = view.convert("HSV").split()
    turned = Image.fromarray(np.asarray(hue) + np.uint8(round(turns * 255) % 256))  # hue is a circle of 256
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def _normalised(view: Image.Image, recipe: Recipe) -> Tensor:
    pixels = torch.from_numpy(np.array(view)).permute(2, 0, 1).contiguous().float().div(255)
    mean, std = (torch.tensor(of_channels).view(3, 1, 1) for of_channels in (recipe.mean, recipe.std))
    return pixels.sub_(mean).div_(std)
