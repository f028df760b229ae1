"""CLIP's loss: symmetric softmax cross-entropy over a batch, with one learned logit scale."""

import math
from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from .base import Progress, Settings, scalar_parameter
from .contrastive import Anchors, Contrastive, Rows, Step

LOG_LOGIT_SCALE_MAX = math.log(100.0)


class ClipSettings(Settings, frozen=True):
    """Settings of CLIP's loss."""

    log_logit_scale: float = Field(default=math.log(1 / 0.07), ge=0.0, le=LOG_LOGIT_SCALE_MAX)
    """Initial log of the learned logit scale (1/tau), in [0, ln 100]. Source: CLIP (Radford et al., 2021)."""


class Clip(Contrastive):
    """Mini-batch loss of image-text pairs: the cross-entropy of S · logit_scale, averaged over both sides.

    The learned `log_logit_scale` is clamped to [0, ln 100]. There is no per-sample state, so `state` may be empty;
    `visits` is updated if given.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": ClipSettings}

    settings: ClipSettings

    def __init__(self, mode: str, settings: ClipSettings) -> None:
        super().__init__(mode, settings)
        self.log_logit_scale = scalar_parameter(settings.log_logit_scale)

    def project(self) -> None:
        self.log_logit_scale.clamp_(0.0, LOG_LOGIT_SCALE_MAX)

    def temperature(self, rows: Rows, like: Tensor) -> Tensor:
        return self.log_logit_scale.neg().exp().to(like)

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        # The positive is a candidate as well, with exponent 0.
        cross_entropy, share = F.softplus(anchors.log_sum), anchors.log_sum.sigmoid()
        weight = share / anchors.tau * self.share(anchors) / 2
        in_scale = (share * anchors.mean_exponent).mean()
        return Step(
            value=cross_entropy.mean(),
            negative_weight=weight,
            parameter_gradients=[in_scale],
            metrics={"logit_scale": self.log_logit_scale.detach().exp()},
        )
