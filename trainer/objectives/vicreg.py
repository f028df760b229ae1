"""VICReg: views that agree, and columns that vary and do not covary (Bardes et al., ICLR 2022)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .base import Computed, Objective, Progress, Settings
from .columns import centred, off_diagonal_products
from .gathering import GlobalBatch
from .pairs import Pairs


class VicregSettings(Settings, frozen=True):
    """Settings of VICReg; the default weights are the authors' code's."""

    invariance: float = Field(default=25.0, ge=0.0)
    """Weight of the mean squared difference of the views, over samples and columns; 0 or more."""
    variance: float = Field(default=25.0, ge=0.0)
    """Weight of the mean of max(0, 1 - deviation) over the columns of both views; 0 or more."""
    covariance: float = Field(default=1.0, ge=0.0)
    """Weight of the squared covariances of different columns, summed and divided by d; 0 or more."""
    eps: float = Field(default=1e-4, gt=0.0)
    """Added to a column's variance, above 0."""


class Vicreg(Objective):
    """Variance, invariance and covariance of two views; features of any norm, no per-sample state.

    Value: invariance · mean_ik (z_ik - z'_ik)² + variance · ½ sum over views of mean_k max(0, 1 - √(var_k + eps))
    + covariance · sum over views of (1/d) sum of cov_kl² over k != l, variances and covariances over b - 1. VICReg
    eq 1-6 with the means of the authors' code, to which their weights belong.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": VicregSettings}

    settings: VicregSettings

    unit_norm = False

    def compute(self, pairs: Pairs, batch: GlobalBatch, state: Mapping[str, Tensor], progress: Progress) -> Computed:
        settings, views = self.settings, centred(pairs.features)
        _, samples, width = views.shape
        own, difference = views[:, pairs.own], pairs.features[0] - pairs.features[1]
        deviations = (views.square().sum(1, keepdim=True) / (samples - 1) + settings.eps).sqrt()
        missing = (1 - deviations).clamp(min=0)

        # The sum of squared covariances, and products with them, in one pass.
        squares, products = views.new_zeros(()), torch.empty_like(own)
        for view, of_view, of_own in zip(views, products, own, strict=True):
            for columns, covariances in off_diagonal_products(view, view, settings.budget_on(views.device)):
                covariances.div_(samples - 1)
                squares += torch.linalg.vector_norm(covariances).square()
                of_view[:, columns] = of_own @ covariances.T

        def feature_gradients() -> Tensor:
            shared = (2 * settings.invariance / samples) * difference[pairs.own]
            spread = settings.variance / (2 * (samples - 1)) * torch.where(missing > 0, 1 / deviations, 0.0)
            apart = 4 * settings.covariance / (samples - 1) * products
            return (torch.stack([shared, -shared]) - spread * own + apart) * (batch.world / width)

        invariance, variance = difference.square().mean(), missing.mean()
        return Computed(
            value=settings.invariance * invariance
            + settings.variance * variance
            + settings.covariance / width * squares,
            feature_gradients=feature_gradients,
            metrics={"deviation_mean": deviations.mean()},
        )
