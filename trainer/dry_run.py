"""A training run in which everything is built but weights, and nothing is written."""

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from .config import TrainConfig
from .encoders import Encoders
from .loop import Trainer
from .plugins import is_directory, is_own_encoder
from .run.restoring import warn_of_changes
from .run.run import Run
from .run.selection_files import holes_in, selected_ids, unchanged
from .run_directory import RunDirectory


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
        with closing(_WithoutMemory(config, directory, **options)) as run:
            trainer = Trainer(run)
            if config.data.without and not run.resumes:
                ids = selected_ids(unchanged(config.data.select, "select"), run.dataset) if config.data.select else None
                run.refuse_thin_steps(holes_in(unchanged(config.data.without, "without"), ids, run.dataset))
            if run.world.is_first and run.start:
                warn_of_changes(config, run.start, run.order.steps_per_epoch)
            yield trainer
