"""What a training run would need: everything is built but weights, and nothing is written; and the time of a step."""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np
import torch

from ..state_store.schema import Schema
from ..storage.local import LocalPath
from .checkpoints.checkpoint_files import Loaded
from .config import TrainConfig
from .encoders import Encoders
from .export import Format, why_impossible
from .loop import Trainer
from .plugins import is_directory, is_own_encoder
from .run.selection_files import holes_in, selected_ids, unchanged
from .run_directory import RunDirectory

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


class DryRun(Trainer):
    """A trainer that refuses what a trainer refuses, with encoders without memory, and ends before it writes."""

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

    def _open(self, start: Loaded | None, opened: ExitStack) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            super()._open(start, opened)

    def _begin(self, start: Loaded | None, opened: ExitStack, *, resume: bool) -> None:
        """Begin nothing, but refuse samples to leave out as a run that begins does."""
        data = self.config.data
        if data.without and not resume:
            ids = selected_ids(unchanged(data.select, "select"), self.dataset) if data.select else None
            self._refuse_thin_steps(holes_in(unchanged(data.without, "without"), ids, self.dataset))

    def needs(self) -> Needs:
        counted = {**dict(self.encoders.named_children()), "objective": self.objective}
        parameters = {name: sum(each.numel() for each in part.parameters()) for name, part in counted.items()}
        weights = [*self.encoders.parameters(), *self.objective.parameters()]
        trained = sum(each.numel() for each in weights if each.requires_grad)
        every = sum(parameters.values()) + (trained if self.average else 0)
        optimizer = self.config.optimizer
        one = optimizer.name in ("sgd", "lars", "lion")
        moments = 0 if optimizer.name == "sgd" and not optimizer.momentum else 1 if one else 2
        row_bytes = 4 * Schema(self.objective.fields).row_words
        rows = self.order.samples // self.world.size
        return Needs(
            parameters={name: count for name, count in parameters.items() if count},
            trained=trained,
            steps=self.total_steps,
            steps_per_epoch=self.order.steps_per_epoch,
            state_in_memory=min(rows * row_bytes, self.config.state.memory_budget or rows * row_bytes),
            weights_on_device=4 * (every + (1 + moments) * trained),
            checkpoint=4 * (every + moments * trained),
            snapshot=self.order.samples * row_bytes,
            formats=tuple(each for each in get_args(Format) if not why_impossible(self.config, each)),
        )


class _TimedRun(Trainer):
    def seconds_a_step(self) -> float:
        """Train a few steps, write no checkpoint, and return the median seconds of one, with its waits."""
        ends = []
        for pieces in islice(self._steps(), FIRST_STEPS + TIMED_STEPS):
            self.step(pieces)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            ends.append(time.monotonic())
        return float(np.median(np.diff(ends[FIRST_STEPS - 1 :])))


def seconds_a_step(config: TrainConfig) -> float:
    """Time steps of a run with these resolved settings, in a temporary directory. Raises as Trainer does."""
    steps = FIRST_STEPS + TIMED_STEPS
    alone = {"trackers": (), "tensorboard": False}
    few = config.model_copy(update=alone | {"steps": steps, "epochs": steps})  # in as many epochs as it takes
    with (
        TemporaryDirectory(prefix="thermopile-") as folder,
        _TimedRun(few, RunDirectory(LocalPath(folder) / "run")) as trainer,
    ):
        return trainer.seconds_a_step()
