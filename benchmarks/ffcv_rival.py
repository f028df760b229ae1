"""FFCV's own Loader and operations on the same file, as its users write them.

They take part only where ffcv is compiled against OpenCV (Debian's libopencv-dev), which `make` does not do:

    pip install --no-deps --no-binary ffcv --target build/opencv ffcv==1.0.2
    PYTHONPATH=build/opencv python -m benchmarks.loader …
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.pipeline.pipeline_spec import PipelineSpec
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.traversal_order.base import TraversalOrder

from thermopile.pipeline.cores import cores
from thermopile.pipeline.dataset.index import SHARD_FOLDER, shard_name
from thermopile.pipeline.views.recipes import RECIPES, Recipe
from thermopile.tools.bench.loader import AHEAD, WARM_UP, Serve, Work

from .ffcv_types import leave_shared_types


def has_opencv() -> bool:
    return "+" not in version("ffcv")


@contextmanager
def ffcv_own_loader(work: Work) -> Iterator[Serve]:
    """Serve random rows of the first shard. A second view is a second pipeline of the same field, which decodes again:
    FFCV's decoder crops and resizes in one go."""
    recipe, batch_size = RECIPES[work.recipe], work.order.batch_size
    pipelines: dict[str, Any] = {"image": _operations(recipe, work.image_size), "source_index": None}
    for view in range(1, work.views):
        decoder, *transforms = _operations(recipe, work.image_size)
        pipelines[f"image_{view}"] = PipelineSpec("image", decoder, transforms)
    leave_shared_types()
    loader = Loader(
        str(work.dataset.path / SHARD_FOLDER / shard_name(0, "beton")), batch_size=batch_size, num_workers=cores(),
        os_cache=True, order=OrderOption.SEQUENTIAL, pipelines=pipelines, batches_ahead=AHEAD,
    )  # fmt: skip
    # Given afterwards: in 1.0.2 the argument `order` takes no order of one's own.
    loader.traversal_order = _RandomRows(loader, batch_size * (WARM_UP + work.batches))
    loader.first_traversal_order = loader.next_traversal_order()
    yield lambda number: iter(loader)


def _operations(recipe: Recipe, image_size: int) -> list[Any]:
    mean, std = (255 * np.array(of_channels) for of_channels in (recipe.mean, recipe.std))
    return [
        RandomResizedCropRGBImageDecoder((image_size, image_size), recipe.scale, recipe.ratio),
        RandomHorizontalFlip(recipe.flip),
        NormalizeImage(mean, std, np.float32),  # before ToTensor: after it, it runs on a GPU only
        ToTensor(),
        ToTorchImage(),
    ]


class _RandomRows(TraversalOrder):  # type: ignore[misc]
    """As many rows as a round takes, so that the iterator's thread ends with it."""

    def __init__(self, loader: Loader, count: int) -> None:
        super().__init__(loader)
        self._count = count

    def sample_order(self, epoch: int) -> Any:
        return np.random.default_rng(epoch).integers(len(self.indices), size=self._count)
