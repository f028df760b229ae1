"""The spectral contrastive loss: a factorisation of the graph of augmented views (HaoChen et al., NeurIPS 2021)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .base import Objective, Outcome, Progress, Settings
from .contrastive import PowerSums
from .gathering import Frame


class SpectralSettings(Settings, frozen=True):
    mu: float = Field(default=1.0, gt=0.0)
    """Largest squared norm, above 0: longer features are shortened to it. The authors' code uses 1 on CIFAR-10 and 10
    on ImageNet."""


class Spectral(Objective):
    """Spectral loss of two views; features of any norm, no per-sample state.

    With y = z where |z|² < mu, otherwise √mu · z / |z|, value: (1/mu) · (-2 mean_i y_i·y'_i + mean of (y_i·y'_j)² over
    i != j). Eq 6 of the paper; the ball and 1/mu come from the authors' code.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": SpectralSettings}

    settings: SpectralSettings

    unit_norm = False
    is_whole = True

    def __init__(self, mode: str, settings: SpectralSettings) -> None:
        super().__init__(mode, settings)
        self.across = True

    def step(self, frame: Frame, state: Mapping[str, Tensor], progress: Progress) -> Outcome:
        views, ranks = self._in_ball(frame.views), frame.ranks
        targets = views.detach() if ranks.world == 1 else self._in_ball(frame.targets)
        pairs = self.compared(replace(frame, targets=targets))
        positive, _, squares, peak = PowerSums.apply(views, pairs, ranks)  # type: ignore[no-untyped-call]
        loss = (squares / pairs.negatives - 2 * positive.mean()) / self.settings.mu
        return Outcome(loss, {}, self.retrieval(positive - peak))

    def _in_ball(self, features: Tensor) -> Tensor:
        radius = math.sqrt(self.settings.mu)
        norms: Tensor = torch.linalg.vector_norm(features, dim=2, keepdim=True)
        return features * (radius / norms.clamp(min=radius))
