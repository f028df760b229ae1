"""The work that loaders do while they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import click
import torch

from ...pipeline.opening import Dataset
from ...pipeline.order.order import Order
from ...pipeline.views.recipes import RECIPES

AHEAD = 2
"""Batches that a loader makes before they are asked for."""
MAX_BATCHES = 12
"""Batches of a round that are timed."""
WARM_UP = 4
"""Batches of a round that are not timed: they fill what a loader keeps ready."""


@dataclass(frozen=True)
class Work:
    """A dataset and how it is loaded."""

    dataset: Dataset
    order: Order
    recipe: str
    views: int
    image_size: int
    batches: int
    """Batches of a round that are timed."""
    device: torch.device
    """Where the batches are wanted; `dali` decodes there."""

    @property
    def first_step(self) -> int:
        """Step of an epoch to start at, so that it ends with the round."""
        return self.order.steps_per_epoch - WARM_UP - self.batches

    @property
    def views_asked(self) -> dict[str, Any]:
        """Options of either loader."""
        recipe, device = RECIPES[self.recipe], self.device.type
        return {"recipe": recipe, "image_size": self.image_size, "views": self.views, "ahead": AHEAD, "device": device}


def work_of(dataset: Dataset, batch: int, recipe: str, views: int, image_size: int, device: torch.device) -> Work:
    """Return the work of a round over `dataset`; raises click.UsageError if the batch is too large for one."""
    order = Order.create(dataset.n, batch)
    batches = min(MAX_BATCHES, order.steps_per_epoch - WARM_UP)
    if batches < 1:
        raise click.UsageError(
            f"{dataset.n:,} images make {order.steps_per_epoch} batches of {batch}, but {WARM_UP + 1} are needed; "
            "choose a smaller --batch"
        )
    return Work(dataset, order, recipe, views, image_size, batches, device)


Serve = Callable[[int], Iterator[object]]
"""Round → that round's batches; nothing works on after the last one."""
Contender = Callable[[Work], AbstractContextManager[Serve]]
