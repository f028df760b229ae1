"""A training run in which everything is built but weights, and nothing is written; and the time of a step."""

import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ..storage.local import LocalPath
from .config import TrainConfig
from .encoders import Encoders
from .loop import Trainer
from .plugins import is_directory, is_own_encoder
from .run.restoring import warn_of_changes
from .run.run import Run
from .run.selection_files import holes_in, selected_ids, unchanged
from .run_directory import RunDirectory

FIRST_STEPS, TIMED_STEPS = 3, 10
"""Steps that are not timed, because much happens in them for the first time, and steps that are."""


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
def dry_run(config: TrainConfig, directory: RunDirectory, **options: Any) -> Iterator[Trainer]:
    """Yield a trainer of a run that does not begin, after refusing what a run that begins refuses. Writes nothing.

    options: as for `Run`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        run = _WithoutMemory(config, directory, **options)
        with closing(run):
            trainer = Trainer(run)
            if config.data.without and not run.resumes:
                ids = selected_ids(unchanged(config.data.select, "select"), run.dataset) if config.data.select else None
                run.refuse_thin_steps(holes_in(unchanged(config.data.without, "without"), ids, run.dataset))
            if run.world.is_first and run.start:
                warn_of_changes(config, run.start, run.order.steps_per_epoch)
            yield trainer


def seconds_a_step(config: TrainConfig) -> float:
    """Train a few steps with these complete settings in a temporary directory, and write no checkpoint.

    Returns the median seconds of one, with its waits. Raises as Trainer does.
    """
    steps, ends = FIRST_STEPS + TIMED_STEPS, []
    few = config.model_copy(update={"trackers": (), "steps": steps, "epochs": steps})  # in as many epochs as it takes
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
