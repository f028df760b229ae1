"""Where our loader's time goes: milliseconds of one core for each step of an image's two views."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from ....pipeline.augment import RECIPES, ViewParameters, view_parameters
from ....pipeline.loading.ffcv_loader import FFCVLoader
from ....pipeline.loading.pixels import gaussian_blur, normalise, recolour
from ....pipeline.loading.resample import resample_into
from ..figure import Figure
from ..measured import Measured
from ..photographs import HEIGHT, WIDTH
from ..rounds import take_turns
from .decode import decode_rows
from .material import Material, prepare
from .sizes import CostSizes

_VIEWS = 2
_RECIPE = RECIPES["simclr"]
_LABELS = {
    "decode": "read and decode",
    "resize": "resize and flip, two views",
    "colour": "colour, two views",
    "blur": "blur, two views",
    "normalise": "normalise, two views",
}


def measure(sizes: CostSizes, directory: Path) -> Measured:
    """Time each step's own function over all images, and the whole loader with one thread."""
    material = prepare(directory, sizes.images, min(sizes.images, 64))
    torch.set_num_threads(1)
    with FFCVLoader.open(
        material.dataset, material.order, recipe=_RECIPE, image_size=sizes.image_size, views=_VIEWS, workers=1
    ) as loader:  # fmt: skip
        measures = _steps(material, sizes) | {"loader": _timed(lambda: _serve(loader))}
        seconds = take_turns("cost", measures, sizes.rounds)
    served = material.order.steps_per_epoch * material.order.batch_size
    ms = {name: median(times) * 1e3 / (served if name == "loader" else sizes.images) for name, times in seconds.items()}
    whole = ms.pop("loader")
    ms["rest"] = max(0.0, whole - sum(ms.values()))
    labels = {**_LABELS, "rest": "the rest: draws, memory, hand-over"}
    return Measured(
        f"SimCLR's whole recipe of {sizes.images} photographs of 400×300, two views of "
        f"{sizes.image_size}×{sizes.image_size}, one thread; medians of {sizes.rounds} rounds",
        "none",
        (
            Figure("whole_ms", "ffcv, an image of two views", "ms", whole),
            *(Figure(f"{name}_ms", f"- {labels[name]}", "ms", ms[name]) for name in ms),
        ),
        notes=(f"What bounds it: {_bound(ms, whole)}.",),
    )


def _bound(ms: dict[str, float], whole: float) -> str:
    views = {"crop and flip": {"decode", "resize", "normalise", "rest"}, "SimCLR's recipe": ms.keys()}
    words = []
    for recipe, names in views.items():
        dearest = max(names, key=lambda name: ms[name])
        share = 100 * ms[dearest] / sum(ms[name] for name in names)
        words.append(f"with {recipe} the {dearest.replace('rest', 'hand-over')} ({share:.0f} % of an image)")
    return ", ".join(words)


def _serve(loader: FFCVLoader) -> None:
    for _ in loader.epoch(0):
        pass


def _steps(material: Material, sizes: CostSizes) -> dict[str, Callable[[int], float]]:
    """Each step alone, over all images and both views."""
    shard, ids = material.dataset.shard(0), np.arange(sizes.images)
    heights, widths = np.full(len(ids), HEIGHT), np.full(len(ids), WIDTH)
    drawn = [view_parameters(_RECIPE, 0, 0, ids, heights, widths, view) for view in range(_VIEWS)]
    picture = np.random.default_rng(0).integers(256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8)
    view = np.zeros((3, sizes.image_size, sizes.image_size), np.float32)
    gain = offset = np.zeros(3, np.float32)

    def for_each(step: Callable[[ViewParameters, int], None]) -> Callable[[int], float]:
        def every_view() -> None:
            for image in range(sizes.images):
                for of_view in drawn:
                    step(of_view, image)

        return _timed(every_view)

    def resize(of_view: ViewParameters, image: int) -> None:
        top, left, height, width = of_view.box[image].astype(np.float64)
        resample_into(view, picture, top, left, height, width, of_view.flip[image])

    def blur(of_view: ViewParameters, image: int) -> None:
        if of_view.blur[image] > 0:
            gaussian_blur(view, of_view.blur[image])

    return {
        "decode": _timed(lambda: decode_rows(shard, ids)),
        "resize": for_each(resize),
        "colour": for_each(
            lambda of_view, image: recolour(view, of_view.colour[image], of_view.colour_mean[image])
        ),
        "blur": for_each(blur),
        "normalise": for_each(lambda of_view, image: normalise(view, gain, offset)),
    }  # fmt: skip


def _timed(work: Callable[[], object]) -> Callable[[int], float]:
    def seconds(number: int) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return seconds
