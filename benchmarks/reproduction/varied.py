"""SogCLR with a temperature of each sample's own, a power of the solved one, that is renewed before every epoch.

Which temperatures of their own are worth anything, where nothing is learned of them: power 0 is SogCLR.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thermopile.storage.place import AnyPlace
from thermopile.tools.inspection.temperatures.solved import Bounds, solve
from thermopile.trainer.evaluation.features import some_features
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import recipe_named
from thermopile.trainer.run.run import Run

OTHERS = 4096
"""Samples that each is compared with."""


def train_varied(path: AnyPlace, data: AnyPlace, settings: dict[str, Any], power: float) -> None:
    """Train to the end. settings: a tree, of iSogCLR on pairs with eta 0, whose loss is then SogCLR's."""
    with Trainer.from_settings(path, data, settings) as trainer:
        trainer.run.take = Varied(trainer.run, power).take  # type: ignore[method-assign]
        trainer.train()


class Varied:
    """The states of a run's samples with temperatures that replace their own; not to be resumed."""

    def __init__(self, run: Run, power: float) -> None:
        self._run, self._take, self._power = run, run.take, power
        self._tau: dict[str, Tensor] = {}

    def take(self, sample_ids: Tensor) -> dict[str, Tensor]:
        state = self._take(sample_ids)
        if self._run.progress.epoch and self._run.steps_done % self._run.order.steps_per_epoch == 0:
            self._tau = self._renewed()
        return state | {f"{side}/tau": tau[sample_ids].to(state[f"{side}/tau"]) for side, tau in self._tau.items()}

    def _renewed(self) -> dict[str, Tensor]:
        """By side the temperatures of all samples, float32 [n]: tau_init times a power of solved over their mean."""
        run, n = self._run, self._run.dataset.n
        settings: Any = run.objective.settings
        bounds = Bounds(settings.rho, settings.tau_min, settings.tau_max)
        run.encoders.eval()
        batches = some_features(run.encoders, run.dataset, np.arange(n), recipe_named(run.config.data.recipe),
                                run.config.data.image_size, run.device)  # fmt: skip
        images, texts = (torch.cat(side).numpy() for side in zip(*batches, strict=True))
        run.encoders.train()
        others = np.random.default_rng(run.steps_done).permutation(n)[:OTHERS]
        own = np.full(n, -1)
        own[others] = np.arange(len(others))
        found = {}
        for side, anchors, against in (("image", images, texts), ("text", texts, images)):
            tau = solve([anchors], [against[others]], own, bounds, population=n).tau.clip(bounds.lowest, bounds.highest)
            varied = settings.tau_init * (tau / tau.mean()) ** self._power
            found[side] = torch.from_numpy(varied.clip(bounds.lowest, bounds.highest))
        return found
