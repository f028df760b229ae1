"""Losses of a view's d columns instead of its b rows: VICReg (Bardes et al., ICLR 2022) and Barlow Twins."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from .base import Objective, Outcome, Progress, Settings, State, slope


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

    settings_of_mode: ClassVar = {"unimodal": VicregSettings}
    settings: VicregSettings
    unit_norm = False
    is_whole = True

    def loss(self, first: Tensor, second: Tensor, own: slice, state: State, progress: Progress) -> Outcome:
        settings, (samples, width) = self.settings, first.shape
        views = [_centred(first), _centred(second)]
        deviations = torch.stack([(view.square().sum(0) / (samples - 1) + settings.eps).sqrt() for view in views])
        variance = (1 - deviations).clamp(min=0).mean()  # eq 1, 2
        # eq 3, 4, as a mean over columns. Covariances are symmetric, so one of their two factors has half of the
        # gradient, for a product less; `slope` adds the other half, and nothing to the value.
        of_views = torch.stack([_off_diagonal(view.detach().T @ view) for view in views])
        covariance = of_views.sum() / (samples - 1) ** 2 / width
        covariance = covariance + slope(covariance)
        invariance = F.mse_loss(first, second)  # eq 5
        loss = settings.invariance * invariance + settings.variance * variance + settings.covariance * covariance
        return Outcome(loss, {}, {"deviation_mean": deviations.mean()})


class BarlowTwinsSettings(Settings, frozen=True):
    redundancy: float = Field(default=0.0051, ge=0.0)
    """Weight of the correlations of different columns, 0 or more; 0.0051 in the authors' code, 0.005 in the paper."""
    eps: float = Field(default=1e-5, gt=0.0)
    """Added to a column's variance, above 0; as in batch normalisation."""


class BarlowTwins(Objective):
    """Redundancy reduction of two views; features of any norm, no per-sample state (Zbontar et al., ICML 2021).

    With C [d, d] the correlations of the first view's columns with the second's over the global batch, value:
    sum_k (1 - C_kk)² + redundancy · sum of C_kl² over k != l. Barlow Twins algorithm 1, its variances over b and with
    eps as in the authors' code.
    """

    settings_of_mode: ClassVar = {"unimodal": BarlowTwinsSettings}
    settings: BarlowTwinsSettings
    unit_norm = False
    is_whole = True

    def loss(self, first: Tensor, second: Tensor, own: slice, state: State, progress: Progress) -> Outcome:
        views = _centred(first), _centred(second)
        one, other = (view / (view.square().mean(0) + self.settings.eps).sqrt() for view in views)
        products, samples = one.T @ other, len(first)  # C times b
        diagonal = products.diagonal().clone() / samples
        redundancy = _off_diagonal(products) / samples**2
        loss = (1 - diagonal).square().sum() + self.settings.redundancy * redundancy
        return Outcome(loss, {}, {"correlation_mean": diagonal.mean()})


def _centred(features: Tensor) -> Tensor:
    centred = features - features.mean(0)
    # Again: the mean of a column far from 0 is itself rounded, and this removes the rest of it.
    return centred - centred.detach().mean(0)


def _off_diagonal(matrix: Tensor) -> Tensor:
    """Return the sum of a matrix's squares outside its diagonal, which is overwritten."""
    norm: Tensor = torch.linalg.vector_norm(matrix.fill_diagonal_(0.0))
    return norm.square()
