"""CLIP's loss, symmetric softmax cross-entropy over a batch with one learned logit scale; and CyCLIP's."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from .base import Computed, Progress, Settings, scalar_parameter
from .contrastive import Anchors, Contrastive, Rows, Step
from .doubt import DoubtSettings
from .estimator import log_g_rows
from .gathering import GlobalBatch
from .pairs import Pairs

LOG_LOGIT_SCALE_MAX = math.log(100.0)


class ClipSettings(DoubtSettings, frozen=True):
    log_logit_scale: float = Field(default=math.log(1 / 0.07), ge=0.0, le=LOG_LOGIT_SCALE_MAX)
    """Initial log of the learned logit scale (1/tau), in [0, ln 100]. Source: CLIP (Radford et al., 2021)."""


class Clip(Contrastive):
    """Mini-batch loss of image-text pairs: the cross-entropy of S · logit_scale, averaged over both sides.

    The learned `log_logit_scale` is clamped to [0, ln 100]. There is no per-sample state, so `state` may be empty;
    `visits` is updated if given. With `doubt_after`: log_g of each side.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": ClipSettings}
    doubt_keeps_mean = True

    settings: ClipSettings

    def __init__(self, mode: str, settings: ClipSettings) -> None:
        super().__init__(mode, settings)
        self.log_logit_scale = scalar_parameter(settings.log_logit_scale)

    def project(self) -> None:
        self.log_logit_scale.clamp_(0.0, LOG_LOGIT_SCALE_MAX)

    def temperature(self, rows: Rows, like: Tensor) -> Tensor:
        return self.log_logit_scale.neg().exp().to(like)

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        # The positive is a candidate too, with exponent 0.
        cross_entropy, share = F.softplus(anchors.log_sum), anchors.log_sum.sigmoid()
        weight = share / anchors.tau * self.share(anchors) / 2
        in_scale = anchors.weighted(share * anchors.mean_exponent).mean()
        return Step(
            value=anchors.weighted(cross_entropy).mean(),
            negative_weight=weight,
            rows=log_g_rows(anchors, rows),
            parameter_gradients=[in_scale],
            metrics={"logit_scale": self.log_logit_scale.detach().exp()},
        )


class CyclipSettings(ClipSettings, frozen=True):
    in_modal: float = Field(default=0.25, ge=0.0)
    """Weight of (1/b) sum_ij (x_i·x_j - t_i·t_j)², 0 or more. CyCLIP eq 4; 0.25 in the authors' command."""
    cross_modal: float = Field(default=0.25, ge=0.0)
    """Weight of (1/b) sum_ij (x_i·t_j - x_j·t_i)², 0 or more. CyCLIP eq 3; 0.25 in the authors' command."""


class Cyclip(Clip):
    """CLIP's loss, and consistency of similarities within and across the sides (CyCLIP, Goel et al., NeurIPS 2022).

    Neither term moves the logit scale. Both and their gradients follow from products [d, d] of the features, so they
    need no matrix [b, b]: for X, T [b, d], |X Xᵀ - T Tᵀ|² = |XᵀX|² - 2 |XᵀT|² + |TᵀT|² and |X Tᵀ - T Xᵀ|² =
    2 <XᵀX, TᵀT> - 2 <XᵀT, TᵀX>.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": CyclipSettings}
    takes_weights = False  # consistency concerns pairs of samples

    settings: CyclipSettings

    def compute(self, pairs: Pairs, batch: GlobalBatch, state: Mapping[str, Tensor], progress: Progress) -> Computed:
        of_clip, samples = super().compute(pairs, batch, state, progress), pairs.batch
        within, across = self.settings.in_modal / samples, self.settings.cross_modal / samples
        (x, t), (own_x, own_t) = pairs.features, pairs.features[:, pairs.own]
        xx, xt, tt = x.T @ x, x.T @ t, t.T @ t

        def feature_gradients() -> Tensor:
            of_x = within * (own_x @ xx - own_t @ xt.T) + across * (own_x @ tt - own_t @ xt)
            of_t = within * (own_t @ tt - own_x @ xt) + across * (own_t @ xx - own_x @ xt.T)
            return of_clip.feature_gradients() + 4 * batch.world * torch.stack([of_x, of_t])

        in_modal = xx.square().sum() - 2 * xt.square().sum() + tt.square().sum()
        cross_modal = 2 * ((xx * tt).sum() - (xt * xt.T).sum())
        return Computed(
            value=of_clip.value + within * in_modal + across * cross_modal,
            feature_gradients=feature_gradients,
            parameter_gradients=of_clip.parameter_gradients,
            state=of_clip.state,
            metrics=of_clip.metrics,
        )
