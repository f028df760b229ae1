"""The spectral contrastive loss: a factorisation of the graph of augmented views (HaoChen et al., NeurIPS 2021)."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .base import Computed, Objective, Progress, Settings
from .gathering import GlobalBatch
from .pairs import Block, Pairs


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

    def __init__(self, mode: str, settings: SpectralSettings) -> None:
        super().__init__(mode, settings)
        self.across = True

    def compute(self, pairs: Pairs, batch: GlobalBatch, state: Mapping[str, Tensor], progress: Progress) -> Computed:
        mu, features, own = self.settings.mu, pairs.features, pairs.own
        norms = torch.linalg.vector_norm(features, dim=2, keepdim=True)
        shortened = norms.square() >= mu
        scale = torch.where(shortened, math.sqrt(mu) / norms, 1.0)
        in_ball = Pairs(features * scale, own, across=self.across, budget=self.settings.budget_on(features.device))
        squares, peak = batch.gather(_own_sums(in_ball))
        negatives = pairs.batch - 1

        def weigh(similarities: Tensor, rows: slice, block: Block) -> None:
            in_ball.fill_own(similarities.mul_(2 / negatives), rows, block, 0.0)

        def feature_gradients() -> Tensor:
            of_ball = in_ball.gradients(weigh, torch.full_like(in_ball.positives, -2.0))
            along = (of_ball * in_ball.features[:, own]).sum(2, keepdim=True) / mu
            of_ball -= torch.where(shortened[:, own], along, 0.0) * in_ball.features[:, own]
            return of_ball * scale[:, own] * (batch.world / (mu * pairs.batch))

        return Computed(
            value=(squares.mean() / negatives - 2 * in_ball.positives.mean()) / mu,
            feature_gradients=feature_gradients,
            metrics=self.by_side(retrieval_accuracy=(in_ball.positives > peak).to(norms.dtype).mean(0, keepdim=True)),
        )


def _own_sums(pairs: Pairs) -> Tensor:
    """Return [2, n], over the negatives of this rank's first view: the sum of squares, and the largest product."""
    block = pairs.blocks[0]
    sums = pairs.table.new_empty((2, pairs.own.stop - pairs.own.start))
    for rows, similarities in pairs.pieces(block):
        squares = similarities.square()
        pairs.fill_own(squares, rows, block, 0.0)
        sums[:, block.local(rows)] = torch.stack([squares.sum(1), similarities.amax(1)])
    return sums
