"""What a training run would need: everything is built but weights, and nothing is written; and the time of a step."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np
import torch

from ..state_store.schema import Schema
from ..storage.local import LocalPath
from .config import TrainConfig
from .encoders import Encoders
from .export import Format, why_impossible
from .loop import Trainer
from .plugins import is_directory, is_own_encoder
from .run.restoring import warn_of_changes
from .run.run import Run
from .run.selection_files import holes_in, selected_ids, unchanged
from .run_directory import RunDirectory
from .world import World

FIRST_STEPS, TIMED_STEPS = 3, 10
"""Steps that are not timed, because much happens in them for the first time, and steps that are."""


@dataclass(frozen=True)
class Needs:
    """What a run has and needs. Sizes are in bytes."""

    parameters: dict[str, int]
    """Number of parameters of each encoder, and of an objective that learns some."""
    trained: int
    """Parameters that are trained."""
    steps: int
    steps_per_epoch: int
    state_in_memory: int
    """Rows of the samples' state on this rank."""
    weights_on_device: int
    """Weights, gradients and the optimiser's state, without activations."""
    checkpoint: int
    """One checkpoint."""
    snapshot: int
    """One full snapshot of the samples' state, before compression."""
    formats: tuple[str, ...]
    """Formats that `export` can write."""


class _WithoutMemory(Run):
    """A run whose encoders have no memory, where nothing needs their weights."""

    def _created_encoders(self, *, pretrained: bool) -> Encoders:
        names = [self.config.model.image.name, self.config.model.text.name]
        own = any(is_directory(name) or is_own_encoder(name) or name.endswith(".safetensors") for name in names)
        if own or self.world.size > 1:  # weights are read, a user's code may need them, and so does DDP
            return super()._created_encoders(pretrained=pretrained)
        device, self.device = self.device, torch.device("meta")
        try:
            with self.device:
                return super()._created_encoders(pretrained=False)  # nothing is fetched
        finally:
            self.device = device


@contextmanager
def dry_run(config: TrainConfig, directory: RunDirectory, *, resume: bool, world: World) -> Iterator[Trainer]:
    """Yield a trainer of a run that does not begin, after refusing what a run that begins refuses. Writes nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        run = _WithoutMemory(config, directory, resume=resume, world=world)
        with closing(run):
            trainer = Trainer(run)
            if config.data.without and not resume:
                ids = selected_ids(unchanged(config.data.select, "select"), run.dataset) if config.data.select else None
                run.refuse_thin_steps(holes_in(unchanged(config.data.without, "without"), ids, run.dataset))
            if world.is_first and run.start:
                warn_of_changes(config, run.start, run.order.steps_per_epoch)
            yield trainer


def needs_of(trainer: Trainer) -> Needs:
    run, optimizer = trainer.run, trainer.run.config.optimizer
    counted = {**dict(run.encoders.named_children()), "objective": run.objective}
    parameters = {name: sum(each.numel() for each in part.parameters()) for name, part in counted.items()}
    weights = [*run.encoders.parameters(), *run.objective.parameters()]
    trained = sum(each.numel() for each in weights if each.requires_grad)
    every = sum(parameters.values()) + (trained if trainer.average else 0)
    one = optimizer.name in ("sgd", "lars", "lion")
    moments = 0 if optimizer.name == "sgd" and not optimizer.momentum else 1 if one else 2
    row_bytes = 4 * Schema(run.objective.fields).row_words
    rows = run.order.samples // run.world.size
    return Needs(
        parameters={name: count for name, count in parameters.items() if count},
        trained=trained,
        steps=run.total_steps,
        steps_per_epoch=run.order.steps_per_epoch,
        state_in_memory=min(rows * row_bytes, run.config.state.memory_budget or rows * row_bytes),
        weights_on_device=4 * (every + (1 + moments) * trained),
        checkpoint=4 * (every + moments * trained),
        snapshot=run.order.samples * row_bytes,
        formats=tuple(each for each in get_args(Format) if not why_impossible(run.config, each)),
    )


def seconds_a_step(config: TrainConfig) -> float:
    """Train a few steps with these complete settings in a temporary directory, and write no checkpoint.

    Returns the median seconds of one, with its waits. Raises as Trainer does.
    """
    steps, ends = FIRST_STEPS + TIMED_STEPS, []
    alone = {"trackers": (), "tensorboard": False}
    few = config.model_copy(update=alone | {"steps": steps, "epochs": steps})  # in as many epochs as it takes
    with (
        TemporaryDirectory(prefix="thermopile-") as folder,
        Trainer.open(few, RunDirectory(LocalPath(folder) / "run")) as trainer,
    ):
        for pieces in islice(trainer.run.steps(), steps):
            trainer.step(pieces)
            if trainer.run.device.type == "cuda":
                torch.cuda.synchronize(trainer.run.device)
            ends.append(time.monotonic())
    return float(np.median(np.diff(ends[FIRST_STEPS - 1 :])))
