"""Measure loaders and trainings fed by them, as `thermopile bench loader` was asked to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ...pipeline.augment import RECIPES
from ...pipeline.dataset import Dataset
from ...pipeline.order import Order
from ...storage.place import Place
from ...trainer.errors import ConfigError
from ...trainer.run.build import device_named
from .loader import LOADERS, NEEDS, missing, rates
from .step import costs_of
from .work import WARM_UP, Work

_MAX_BATCHES = 12
"""Batches of a round that are timed."""


@dataclass(frozen=True)
class FeedingOptions:
    """The options of `thermopile bench loader`."""

    data: Place | None
    device: str
    recipe: str
    views: int
    image_size: int
    batch: int
    images: int
    rounds: int
    image: str | None
    steps: int

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a training as in a run's config.toml."""
        return {
            "device": self.device,
            "batch_size": self.batch,
            "model": {"image": {"name": self.image}},
            "data": {"recipe": self.recipe, "image_size": self.image_size},
        }


@dataclass
class Fed:
    """What was measured."""

    samples: int
    device: str
    images_per_second: dict[str, float] = field(default_factory=dict)
    """Name of a loader, or `decode` -> median of the rounds."""
    missing: dict[str, str] = field(default_factory=dict)
    """Name of what was not measured -> why."""
    ffcv_ms_per_image: dict[str, float] = field(default_factory=dict)
    """Part of ffcv's work -> milliseconds of one core."""
    training_samples_per_second: dict[str, float] = field(default_factory=dict)
    """synthetic, or the name of a loader -> samples a second of a training."""


def measure(asked: FeedingOptions, temporary: Path) -> Fed:
    """Measure every loader whose package is there.

    Raises ConfigError if a setting does not fit, ValueError if the batch is too large for the dataset, or if no dataset
    is given and none can be made.
    """
    device = device_named(asked.device)
    if asked.recipe not in RECIPES:
        raise ConfigError(f"data.recipe = {asked.recipe!r} is unknown; available: {', '.join(RECIPES)}")
    lacking = {name: why for name, module in NEEDS.items() if (why := missing(module))}
    dataset = Dataset(asked.data) if asked.data else _photographs(asked.images, lacking, temporary)
    order = Order.create(dataset.n, asked.batch)
    batches = min(_MAX_BATCHES, order.steps_per_epoch - WARM_UP)
    if batches < 1:
        raise ValueError(
            f"{dataset.n:,} images make {order.steps_per_epoch} batches of {asked.batch}, but "
            f"{WARM_UP + 1} are needed; choose a smaller --batch"
        )
    work = Work(dataset, order, asked.recipe, asked.views, asked.image_size, batches, device)
    contenders = {name: contender for name, contender in LOADERS.items() if name not in lacking}
    fed = Fed(dataset.n, device.type, missing=lacking)
    fed.images_per_second = {name: median(found) for name, found in rates(contenders, work, asked.rounds).items()}
    if "ffcv" in contenders:
        from .decoding import costs

        fed.ffcv_ms_per_image = costs(work, images=256, rounds=asked.rounds)
    if asked.image:
        loaders = [name for name in contenders if name != "decode"]
        trained, failure = costs_of(dataset, asked.settings, loaders, asked.steps, temporary)
        fed.training_samples_per_second = {cost.loader: cost.samples_per_second for cost in trained}
        if failure:
            fed.missing["training"] = failure
    return fed


def _photographs(images: int, lacking: Mapping[str, str], directory: Path) -> Dataset:
    if "ffcv" in lacking:
        raise ValueError(f"photographs cannot be converted here: {lacking['ffcv']}; pass a dataset with --data")
    from .photographs import photographs

    return photographs(directory, images)
