"""A run of the real trainer on batches that lie in memory, watched from outside: no loader works meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....pipeline.batch import Batch
from ....pipeline.conversion.convert import ConvertSettings, convert
from ....pipeline.dataset import Dataset
from ....pipeline.order import Order
from ....pipeline.sources.glyphs import GlyphSource
from ....trainer.build import resolve
from ....trainer.config import load_config
from ....trainer.config_layers import merge, read_preset
from ....trainer.loop import Trainer
from ....trainer.run_directory import RunDirectory
from ..progress import say
from .sizes import Sizes

AfterStep = Callable[[int, "BatchesInMemory"], None]
"""Told the number of steps done, and where to have their batches."""


def open_trainer(sizes: Sizes, directory: Path, settings: dict[str, Any]) -> Trainer:
    """A trainer at the start of a run in `directory`, with the settings of the preset `glyphs` but for these."""
    say(f"making {sizes.samples:,} glyphs")
    convert(GlyphSource(0), directory / "glyphs", ConvertSettings(), selection=np.arange(sizes.samples))
    dataset = Dataset(directory / "glyphs")
    tree = read_preset("glyphs")
    merge(tree, {
        "device": "cpu", "batch_size": sizes.batch, "epochs": 1 + sizes.steps * sizes.batch // sizes.samples * 2,
        "data": {"path": str(dataset.path)}, "model": {"image": {"name": sizes.image}},
    })  # fmt: skip
    merge(tree, settings)
    return Trainer.open(resolve(load_config(tree), dataset), RunDirectory(directory / "run"))


def run(trainer: Trainer, steps: int, after_step: AfterStep) -> list[float]:
    """Train, and return the seconds of each of the first `steps` steps.

    after_step is called while the trainer waits for its next batch; its time is not counted.
    """
    batches = BatchesInMemory(list(trainer.loader.epoch(0)), trainer.order, after_step)
    trainer.loader.close()
    trainer.loader = batches  # type: ignore[assignment]  # all that the trainer asks of a loader from here on
    # The time of a step is known when the next batch is asked for, so one more step is made.
    trainer.run(should_stop=lambda: len(batches.seconds) >= steps)
    return batches.seconds[:steps]


class BatchesInMemory:
    """In place of a loader: the pictures and captions of the first epoch over and over, with the ids of each step."""

    def __init__(self, first_epoch: list[Batch], order: Order, after_step: AfterStep) -> None:
        self._first_epoch, self._order, self._after_step = first_epoch, order, after_step
        self.seconds: list[float] = []
        """Of each step, from when its batch is handed out to when the next one is asked for."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from its step `first_step`."""
        for step in range(first_step, self._order.steps_per_epoch):
            batch = self.batch(epoch * self._order.steps_per_epoch + step)
            began = time.perf_counter()
            yield batch
            self.seconds.append(time.perf_counter() - began)
            self._after_step(len(self.seconds), self)

    def batch(self, step: int) -> Batch:
        """That of the step after `step` others, over all epochs."""
        epoch, of_epoch = divmod(step, self._order.steps_per_epoch)
        return replace(self._first_epoch[of_epoch], sample_ids=torch.from_numpy(self._order.batch_ids(epoch, of_epoch)))
