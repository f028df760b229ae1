"""SogCLR with a temperature of each sample's own, a power of the solved one, that is renewed before every epoch.

Which temperatures of their own are worth anything, where nothing is learned of them: power 0 is SogCLR.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thermopile.trainer.run.run import Run
from thermopile.trainer.solved_temperatures import Bounds, solve

from .division import features_of

OTHERS = 2048
"""Samples that each is compared with."""


class Varied:
    """The states of a run's samples with temperatures that replace their own; not to be resumed."""

    def __init__(self, run: Run, power: float) -> None:
        """run: of iSogCLR on pairs with eta 0, whose features then learn as SogCLR's."""
        self._run, self._take, self._power = run, run.take, power
        self._tau: dict[str, Tensor] = {}

    def take(self, sample_ids: Tensor) -> dict[str, Tensor]:
        state = self._take(sample_ids)
        if self._run.progress.epoch and self._run.steps_done % self._run.order.steps_per_epoch == 0:
            self._tau = self._renewed()
        return state | {name: tau[sample_ids].to(state[name]) for name, tau in self._tau.items()}

    def _renewed(self) -> dict[str, Tensor]:
        """By field the temperatures of all samples, float32 [n]: tau_init times a power of solved over their mean."""
        settings: Any = self._run.objective.settings
        bounds = Bounds(settings.rho, settings.tau_min, settings.tau_max)
        images, texts = (side.numpy() for side in features_of(self._run))
        others = np.random.default_rng(self._run.steps_done).permutation(len(images))[:OTHERS]
        own, found = np.full(len(images), -1), {}
        own[others] = np.arange(len(others))
        for side, anchors, against in (("image", images, texts), ("text", texts, images)):
            solved = solve([anchors], [against[others]], own, bounds, population=len(own)).tau
            solved = solved.clip(bounds.lowest, bounds.highest)
            tau = settings.tau_init * (solved / solved.mean()) ** self._power
            found[f"{side}/tau"] = torch.from_numpy(tau.clip(bounds.lowest, bounds.highest))
        return found
