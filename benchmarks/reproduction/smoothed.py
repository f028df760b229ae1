"""CLIP with label smoothing, and a logit scale that may stay as it is: what a user would try against wrong captions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from thermopile import Objective, Outcome
from thermopile.trainer.objectives.base import scalar_parameter
from thermopile.trainer.objectives.clip import LOG_LOGIT_SCALE_MAX, ClipSettings


class SmoothedClipSettings(ClipSettings, frozen=True):
    """Settings of SmoothedClip."""

    label_smoothing: float = Field(default=0.0, ge=0, le=1)
    """Share of the target that all candidates have alike."""
    learned: bool = True
    """Whether the logit scale is learned."""


class SmoothedClip(Objective):
    """CLIP's loss with smoothed targets."""

    settings_of_mode: ClassVar = {"bimodal": SmoothedClipSettings}
    settings: SmoothedClipSettings

    def __init__(self, mode: str, settings: SmoothedClipSettings) -> None:
        super().__init__(mode, settings)
        scale = scalar_parameter(settings.log_logit_scale)
        if settings.learned:
            self.log_logit_scale = scale
        else:
            self.register_buffer("log_logit_scale", scale.detach())

    def project(self) -> None:
        self.log_logit_scale.clamp_(0.0, LOG_LOGIT_SCALE_MAX)

    def loss(
        self, first: Tensor, second: Tensor, own: slice, state: Mapping[str, Tensor], progress: object
    ) -> Outcome:  # fmt: skip
        """As Objective.loss: [b, d] features."""
        logits, rows = self.log_logit_scale.exp().to(first) * first @ second.T, torch.arange(len(first))[own]
        of_sides = [F.cross_entropy(of_side[own], rows, label_smoothing=self.settings.label_smoothing)
                    for of_side in (logits, logits.T)]  # fmt: skip
        return Outcome(torch.stack(of_sides).mean(), {}, {"logit_scale": self.log_logit_scale.detach().exp()})
