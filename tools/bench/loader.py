"""Measure what this machine can feed: images per second of both loaders."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import click
import torch

from ...pipeline.opening import Dataset
from ...pipeline.order.order import Order
from ...pipeline.views.recipes import RECIPES
from ..progress import progress_bar

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


def work_of(dataset: Dataset, batch: int, recipe: str, views: int, image_size: int, device: torch.device) -> Work:
    """Return the work of a round over `dataset`; raises click.UsageError if the batch is too large for one."""
    order = Order.create(dataset.n, batch)
    batches = min(MAX_BATCHES, order.steps_per_epoch - WARM_UP)
    if batches < 1:
        few = f"{dataset.n:,} images make {order.steps_per_epoch} batches of {batch}"
        raise click.UsageError(f"{few}, but {WARM_UP + 1} are needed; choose a smaller --batch")
    return Work(dataset, order, recipe, views, image_size, batches, device)


Serve = Callable[[int], Iterator[object]]
"""Round → that round's batches; nothing works on after the last one."""
Contender = Callable[[Work], AbstractContextManager[Serve]]


@contextmanager
def _loader(module: str, name: str, work: Work, **options: Any) -> Iterator[Serve]:
    """Serve with a loader, on all cores. options: further ones of the loader."""
    make = getattr(import_module(f"...pipeline.loading.{module}", __package__), name)  # each takes a second to import
    options |= {"recipe": RECIPES[work.recipe], "image_size": work.image_size, "views": work.views, "ahead": AHEAD}
    with make(work.dataset, work.order, device=work.device.type, **options) as loader:
        yield lambda number: loader.epoch(number, work.first_step)


ffcv, dali = partial(_loader, "ffcv_loader", "FFCVLoader"), partial(_loader, "dali_loader", "DALILoader")
LOADERS: dict[str, Contender] = {"ffcv": ffcv, "dali": dali}
NEEDS = {"ffcv": "...pipeline.dataset.jpeg", "dali": "nvidia.dali"}
"""The module that each needs. Not ffcv itself, whose import sets torch and numba to one thread."""


def missing(module: str) -> str:
    """Return why a module cannot be imported, or ""."""
    try:
        import_module(module, __package__)
    except (ImportError, OSError) as error:  # OSError: a library that it is linked to
        return str(error)
    return ""


def rates(contenders: Mapping[str, Contender], work: Work, rounds: int) -> dict[str, list[float]]:
    """Return each one's images per second, round by round; they take turns, after a round of warm-up."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    with ExitStack() as opened, progress_bar("rounds", 1 + rounds) as bar:
        opened.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # as importing FFCV does
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
