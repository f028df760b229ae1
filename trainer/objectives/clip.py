"""CLIP's loss: the symmetric softmax cross-entropy of a batch, with one learned logit scale."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from .base import Objective, Outcome, Progress, Settings, check_features, count_visit, working_dtype
from .closed_form import attach_gradients
from .contrast import bimodal_gradients, contrast
from .precision import full_precision

LOG_LOGIT_SCALE_MAX = math.log(100.0)


class ClipSettings(Settings, frozen=True):
    """Settings of CLIP's loss."""

    log_logit_scale: float = Field(default=math.log(1 / 0.07), ge=0.0, le=LOG_LOGIT_SCALE_MAX)
    """Start of the learned log of the logit scale (1/tau), in [0, ln 100]. Source: CLIP (Radford et al., 2021)."""


def inward_gradient(log_logit_scale: Tensor, gradient: Tensor) -> Tensor:
    """A clamped parameter's gradient: 0 where the parameter is at or past a bound and descent would lead further out.

    A gradient that leads back passes. torch.clamp's is 0 everywhere outside, which would hold the parameter there.
    """
    outward = ((log_logit_scale >= LOG_LOGIT_SCALE_MAX) & (gradient < 0)) | ((log_logit_scale <= 0) & (gradient > 0))
    return torch.where(outward, torch.zeros_like(gradient), gradient)


class Clip(Objective):
    """Mini-batch loss of image-text pairs: the cross-entropy of S · logit_scale, mean over both sides.

    The learned `log_logit_scale` is clamped to [0, ln 100] in use; see inward_gradient for what it learns at a bound.
    It keeps no state per sample, so an empty `state` will do; `visits` is counted where given.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": ClipSettings}

    def __init__(self, mode: str, settings: ClipSettings) -> None:
        super().__init__()
        self.settings = settings
        self.fields = {}
        # One number: float64 costs nothing, and the start stays exact for features in float64.
        self.log_logit_scale = nn.Parameter(torch.tensor(settings.log_logit_scale, dtype=torch.float64))

    def forward(self, first: Tensor, second: Tensor, state: Mapping[str, Tensor], progress: Progress) -> Outcome:
        """See Objective. Computed in the features' dtype, at least float32."""
        check_features(first, second)
        dtype, samples = working_dtype(first, second), len(first)
        with torch.no_grad(), full_precision(first.device.type):
            log_logit_scale = self.log_logit_scale.to(dtype)
            logit_scale = log_logit_scale.clamp(0.0, LOG_LOGIT_SCALE_MAX).exp()
            first_wide, second_wide = first.to(dtype), second.to(dtype)
            similarities = first_wide @ second_wide.T
            positives = similarities.diagonal().clone()
            tau = (1.0 / logit_scale).expand(samples)
            # The positive is a candidate too, so an anchor's log_sum is its cross-entropy.
            sides = (
                contrast(similarities, positives, tau, dim=1, out=torch.empty_like(similarities)),
                contrast(similarities, positives, tau, dim=0, out=similarities),
            )
            value = torch.stack([side.log_sum.mean() for side in sides]).mean()
            in_scale = torch.stack([side.mean_exponent.mean() for side in sides]).mean()
            pull = (logit_scale / (2 * samples)).expand(samples)
            gradients = bimodal_gradients(first_wide, second_wide, sides, (pull, pull))
            in_scale = inward_gradient(log_logit_scale, in_scale)
        loss = attach_gradients(value, [first, second, self.log_logit_scale], [*gradients, in_scale])
        new_state = {"visits": count_visit(state["visits"])} if "visits" in state else {}
        return Outcome(loss, new_state, {"logit_scale": logit_scale})
