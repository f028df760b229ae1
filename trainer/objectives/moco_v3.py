"""MoCo v3: InfoNCE of each view against the momentum encoder's keys of the other view (Chen et al., ICCV 2021)."""

from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from .base import Progress, Settings
from .contrastive import Anchors, Contrastive, Rows, Step


class MocoV3Settings(Settings, frozen=True):
    tau: float = Field(default=0.2, ge=1e-4, le=100.0)
    """Temperature, 0.0001 to 100. 0.2 with ViT; 1.0 in the ResNet-50 runs of the authors' code."""


class MocoV3(Contrastive):
    """InfoNCE over a batch's keys, times 2 tau, summed over both directions; no queue, no per-sample state.

    Value: the sum over directions (first view, second key) and (second view, first key) of (2 tau / b) · sum_i
    [log sum_j exp(q_i·k_j / tau) - q_i·k_i / tau]. MoCo v3 algorithm 1. With m local views: 2 / T of the sum over the T
    = 2 (1 + m) directions.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": MocoV3Settings}
    keys = "always"
    has_local = True
    settings: MocoV3Settings

    def temperature(self, rows: Rows, like: Tensor) -> Tensor:
        return like.new_full((), self.settings.tau)

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        # The positive is a candidate too, with exponent 0.
        weight = 2 * anchors.log_sum.sigmoid() * self.share(anchors)
        return Step(2 * self.settings.tau * anchors.weighted(F.softplus(anchors.log_sum)).mean(), weight)
