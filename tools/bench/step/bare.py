"""The computation of a step and nothing else, as one would write it for a benchmark."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ....pipeline.batch import Batch
from ....pipeline.dataset import Dataset
from ....trainer.build import objective_of
from ....trainer.config import TrainConfig
from ....trainer.encoders import Encoders
from ....trainer.objectives import Progress
from ....trainer.optim import create_optimizer, learning_rate


class BareLoop:
    """The trainer's encoders, objective and optimiser. State lies in plain tensors, of one batch, not looked up by id.

    No store, no log, no clocks, and nothing that ends a run or goes on with it.
    """

    def __init__(self, config: TrainConfig, dataset: Dataset, steps_per_epoch: int, total_steps: int) -> None:
        torch.manual_seed(config.seed)
        self._config, self._steps_per_epoch, self._total_steps = config, steps_per_epoch, total_steps
        self.encoders = Encoders.create(
            config.model, config.objective.mode, config.data.image_size, dataset.index.tokenizer
        )
        self._objective = objective_of(config)
        self._optimizer = create_optimizer(config.optimizer, self.encoders, self._objective).weights
        self._state: dict[str, Tensor] = {
            name: torch.full((config.batch_size,), value) for name, value in self._objective.fields.items()
        }
        self._state["visits"] = torch.zeros(config.batch_size, dtype=torch.uint32)
        self._steps_done = 0

    def seconds(self, batches: Sequence[Batch]) -> float:
        """How long a step on each of these batches takes, in all."""
        began = time.perf_counter()
        for batch in batches:
            self._step(batch)
        return time.perf_counter() - began

    def _step(self, batch: Batch) -> None:
        first, second = self.encoders(batch)
        outcome = self._objective(first, second, self._state, Progress(self._steps_done, self._steps_per_epoch))
        self._state = outcome.state
        rate = learning_rate(self._config.optimizer, self._steps_done, self._steps_per_epoch, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        outcome.loss.backward()
        self._optimizer.step()
        self._steps_done += 1
