"""CyCLIP: CLIP's loss, and consistency of the similarities within and across the sides (Goel et al., NeurIPS 2022)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .base import Computed, Progress, Settings
from .clip import Clip, ClipSettings
from .gathering import GlobalBatch
from .pairs import Pairs


class CyclipSettings(ClipSettings, frozen=True):
    """Settings of CyCLIP."""

    in_modal: float = Field(default=0.25, ge=0.0)
    """Weight of (1/b) sum_ij (x_i·x_j - t_i·t_j)², 0 or more. CyCLIP eq 4; 0.25 in the authors' command."""
    cross_modal: float = Field(default=0.25, ge=0.0)
    """Weight of (1/b) sum_ij (x_i·t_j - x_j·t_i)², 0 or more. CyCLIP eq 3; 0.25 in the authors' command."""


class Cyclip(Clip):
    """CLIP's loss plus both terms of consistency, which do not move the logit scale.

    Both terms and their gradients follow from products [d, d] of the features, so no matrix [b, b] is made for them:
    for X, T [b, d], |X Xᵀ - T Tᵀ|² = |XᵀX|² - 2 |XᵀT|² + |TᵀT|² and |X Tᵀ - T Xᵀ|² = 2 <XᵀX, TᵀT> - 2 <XᵀT, TᵀX>.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": CyclipSettings}

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
