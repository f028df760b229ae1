"""SigLIP: every pair of a batch is a question of its own, answered by a sigmoid (Zhai et al., ICCV 2023)."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from .base import Computed, Objective, Progress, Settings, scalar_parameter
from .gathering import GlobalBatch
from .pairs import EXCLUDED, Block, Pairs


class SiglipSettings(Settings, frozen=True):
    """Settings of SigLIP. Both are initial values of learned parameters."""

    log_logit_scale: float = Field(default=math.log(10.0), ge=-10.0, le=10.0)
    """Initial log of the learned logit scale, in [-10, 10]. SigLIP algorithm 1."""
    logit_bias: float = Field(default=-10.0, ge=-100.0, le=100.0)
    """Initial value of the learned bias, in [-100, 100]: at first, few pairs count as positive. Algorithm 1."""


class Siglip(Objective):
    """Sigmoid loss of image-text pairs; no per-sample state.

    Value: -(1/b) sum over all i, j of log sigmoid(z_ij · (S_ij · exp(log_logit_scale) + logit_bias)), z_ij = 1 where
    i = j, otherwise -1. SigLIP algorithm 1. Neither parameter is clamped, as in the authors' code.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": SiglipSettings}

    settings: SiglipSettings

    def __init__(self, mode: str, settings: SiglipSettings) -> None:
        super().__init__(mode, settings)
        self.log_logit_scale = scalar_parameter(settings.log_logit_scale)
        self.logit_bias = scalar_parameter(settings.logit_bias)

    def compute(self, pairs: Pairs, batch: GlobalBatch, state: Mapping[str, Tensor], progress: Progress) -> Computed:
        scale, bias = self.log_logit_scale.exp().to(pairs.features.dtype), self.logit_bias.to(pairs.features.dtype)
        positive = (pairs.features[0] * pairs.features[1]).sum(1)
        losses, weights, moments, *peaks = batch.gather(_own_sums(pairs, scale, bias))
        wrong = -(positive * scale + bias)
        share = wrong.sigmoid()

        def weigh(similarities: Tensor, rows: slice, block: Block) -> None:
            similarities.mul_(scale).add_(bias).sigmoid_().mul_(scale)

        return Computed(
            value=(losses + F.softplus(wrong)).mean(),
            feature_gradients=lambda: pairs.gradients(weigh, -scale * share).mul_(batch.world / len(positive)),
            parameter_gradients=[scale * (moments - share * positive).mean(), (weights - share).mean()],
            metrics={"logit_scale": scale.clone(), "logit_bias": self.logit_bias.detach().clone()}
            | self.by_side(retrieval_accuracy=(positive > torch.stack(peaks)).to(positive.dtype).mean(1)),
        )


def _own_sums(pairs: Pairs, scale: Tensor, bias: Tensor) -> Tensor:
    """Return [5, n]: sums over the negatives of this rank's images of the loss, its derivative w by the logit and
    w · S, and the largest similarity of this rank's images and captions to a negative.
    """
    sums = pairs.table.new_zeros((5, pairs.own.stop - pairs.own.start))
    peaks = sums[3:].fill_(EXCLUDED)
    for half, block in enumerate(pairs.blocks):
        for rows, similarities in pairs.pieces(block):
            own = block.local(rows)
            peaks[half, own] = similarities.amax(1)
            if pairs.mirrored:
                peaks[1] = torch.maximum(peaks[1], similarities.amax(0))
            if half == 0:
                logits = similarities * scale + bias  # so negative at the positives that they add nothing
                weights = logits.sigmoid()
                sums[:3, own] = torch.stack(
                    [F.softplus(logits).sum(1), weights.sum(1), weights.mul_(similarities).sum(1)]
                )
    return sums
