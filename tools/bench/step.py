"""Measure a training step: the real trainer on batches kept in memory, so that no loader runs beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ...pipeline.batch import Batch
from ...pipeline.conversion.convert import ConvertSettings, convert
from ...pipeline.dataset import Dataset
from ...pipeline.order import Order
from ...pipeline.sources.glyphs import GlyphSource
from ...trainer.build import resolve
from ...trainer.config import load_config
from ...trainer.config_layers import merge
from ...trainer.loop import Trainer
from ...trainer.run_directory import RunDirectory
from ...trainer.step_clock import COMPUTATION
from ...trainer.step_report import split

_WARM_UP = 5
"""Steps that are not counted: torch initialises itself in them."""
_KEPT_BATCHES = 4
_NO_CHECKPOINT = {"checkpoint": {"every_steps": 0, "every_minutes": 0}}


@dataclass(frozen=True)
class StepCost:
    """A step of one configuration."""

    image: str
    """The image encoder's name."""
    device: str
    batch_size: int
    parameters: int
    step_ms: float
    """Median."""
    samples_per_second: float
    shares: dict[str, float]
    """Parts of the steps' time, 0 … 1: forward_backward, optimizer, store_wait, …, as `thermopile status` has them."""
    peak_gpu_bytes: int | None
    """Most memory that torch had on the GPU; None on a CPU."""


def step_cost(dataset: Dataset, settings: dict[str, Any], steps: int, directory: Path) -> StepCost:
    """Train `steps` steps in `directory`, without checkpoints, and return the cost of one.

    settings: as in a run's config.toml. Raises ConfigError if they do not fit, and torch.OutOfMemoryError.
    """
    merge(settings, _NO_CHECKPOINT)
    with open_trainer(dataset, settings, _WARM_UP + steps, directory) as trainer:
        on_gpu = trainer.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        run(trainer, _WARM_UP + steps)
        lines = [json.loads(line) for line in trainer.run_directory.metrics_file.read_text().splitlines()]
        lines = lines[_WARM_UP : _WARM_UP + steps]
        seconds = median(map(_seconds_of, lines))
        return StepCost(
            image=trainer.config.model.image.name or "",
            device=str(trainer.device),
            batch_size=trainer.config.batch_size,
            parameters=sum(parameter.numel() for parameter in trainer.encoders.parameters()),
            step_ms=1e3 * seconds,
            samples_per_second=trainer.config.batch_size / seconds,
            shares=split([line | {"step_seconds": _seconds_of(line), "data_wait_seconds": 0.0} for line in lines]),
            peak_gpu_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        )


def _seconds_of(line: dict[str, Any]) -> float:
    """Return how long a step of metrics.jsonl took; a GPU may still be computing when the process is done."""
    computed = sum(line[f"{part}_seconds"] for part in COMPUTATION)
    return max(float(line["step_seconds"] - line["data_wait_seconds"]), float(computed))


def glyphs(directory: Path, samples: int) -> Dataset:
    """Write a dataset of the first glyphs, `samples` at most, to `directory`: pictures of 32 pixels with captions."""
    source = GlyphSource(0)
    chosen = np.arange(min(samples, len(source)))
    convert(source, directory / "glyphs", ConvertSettings(), workers=1, selection=chosen)
    return Dataset(directory / "glyphs")


def open_trainer(dataset: Dataset, settings: dict[str, Any], steps: int, directory: Path) -> Trainer:
    """Return a trainer at the start of a run of at least `steps` steps in `directory`/run."""
    tree = {**settings, "data": {**settings.get("data", {}), "path": str(dataset.path)}}
    tree["epochs"] = 1 + 2 * steps * load_config(tree).batch_size // dataset.n
    return Trainer.open(resolve(load_config(tree), dataset), RunDirectory(directory / "run"))


def run(trainer: Trainer, steps: int, after_step: Callable[[int], None] = lambda done: None) -> list[float]:
    """Train, and return the seconds of each of the first `steps` steps.

    Calls after_step with the steps done while the trainer waits for its next batch; its time is not counted.
    """
    batches = BatchesInMemory.of(trainer, after_step)
    # The time of a step is known when the next batch is asked for, so one more step is made.
    trainer.run(should_stop=lambda: len(batches.seconds) >= steps)
    return batches.seconds[:steps]


class BatchesInMemory:
    """Stands in for a loader: repeats a few batches of pictures and captions, with the ids of each step."""

    def __init__(self, kept: list[Batch], order: Order, after_step: Callable[[int], None]) -> None:
        self._kept, self._order, self._after_step = kept, order, after_step
        self.seconds: list[float] = []
        """Seconds of each step, from handing out its batch to the request for the next one."""

    @classmethod
    def of(cls, trainer: Trainer, after_step: Callable[[int], None] = lambda done: None) -> BatchesInMemory:
        """Make a few batches with a trainer's loader, close it, and take its place."""
        batches = cls(list(islice(trainer.loader.epoch(0), _KEPT_BATCHES)), trainer.order, after_step)
        trainer.loader.close()
        trainer.loader = batches  # type: ignore[assignment]  # all that the trainer asks of a loader from here on
        return batches

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from its step `first_step`."""
        for step in range(first_step, self._order.steps_per_epoch):
            kept = self._kept[(epoch * self._order.steps_per_epoch + step) % len(self._kept)]
            batch = replace(kept, sample_ids=torch.from_numpy(self._order.batch_ids(epoch, step)))
            began = time.perf_counter()
            yield batch
            self.seconds.append(time.perf_counter() - began)
            self._after_step(len(self.seconds))
