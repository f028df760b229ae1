"""The moving-average estimator s of each sample's inner value g, stored as log s; all log-domain formulas are here."""

import math
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from .base import Progress, Settings
from .contrastive import Anchors, Contrastive
from .schedules import cosine_by_epoch


class AverageSettings(Settings, frozen=True):
    """How fast a moving average follows the batches."""

    gamma: float = Field(default=0.8, gt=0.0, le=1.0)
    """Weight of the new value in the average, in (0, 1]; 1 keeps no memory; unused with gamma_decay_epochs.
    iSogCLR eq 12, where it is beta_0."""
    gamma_min: float = Field(default=0.2, gt=0.0, le=1.0)
    """Final gamma of the cosine, in (0, 1]; used only with gamma_decay_epochs. FastCLIP section 5."""
    gamma_decay_epochs: int | None = Field(default=None, ge=1)
    """Epochs (1 or more) in which gamma falls as a cosine from 1 to gamma_min; unset: constant. FastCLIP section 5."""

    def gamma_at(self, progress: Progress) -> float:
        """Return the weight of the new value in this step."""
        if self.gamma_decay_epochs is None:
            return self.gamma
        return cosine_by_epoch(progress, 1.0, self.gamma_min, self.gamma_decay_epochs)


class EstimatorSettings(AverageSettings, frozen=True):
    """Settings shared by all global contrastive objectives."""

    eps: float = Field(default=0.0, ge=0.0)
    """Added to s before division or logarithm, 0 or more. FastCLIP eq 2-7."""


class Estimate(NamedTuple):
    """The estimator after a step, and values derived from it."""

    log_s: Tensor
    """[sides, b], new value."""
    log_s_eps: Tensor
    """[sides, b], log(s + eps)."""
    ratio: Tensor
    """[2, b], g / (s + eps) of each anchor; its weights p sum to this."""
    exponent: Tensor
    """[sides, b], sum_j p_ij · h_ij / tau_i."""


def estimate(
    objective: Contrastive, anchors: Anchors, log_s: Tensor, settings: EstimatorSettings, progress: Progress
) -> Estimate:
    """Update s from the anchors' sums; log_s: [sides, b], old value.

    The weights use the new s, as FastCLIP and iSogCLR's code do. Source: iSogCLR eq 11-19; FastCLIP eq 1-10.
    """
    log_g = anchors.log_sum - math.log(anchors.candidates)
    log_s = update_log_s(log_s, objective.pool_log(log_g), settings.gamma_at(progress))
    log_s_eps = log_with_eps(log_s, settings.eps)
    ratio = (log_g - log_s_eps).exp()
    return Estimate(log_s, log_s_eps, ratio, objective.pool(ratio * anchors.mean_exponent))


def estimate_metrics(objective: Contrastive, before: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Return the share of unseen samples and the mean of the new log s; before, after: log s, [sides, b]."""
    return objective.by_side(log_s_mean=after.mean(1), share_unseen=torch.isneginf(before).to(before.dtype).mean(1))


def update_log_s(log_s: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """Move s toward this batch's inner value, in logs: s <- (1 - gamma) s + gamma g; s <- g if unseen.

    log_s, log_g: equal shapes; log_s is -inf for an unseen sample, log_g is finite. gamma in (0, 1] is the weight of
    the new value. Source: iSogCLR eq 12, 17, 18; FastCLIP eq 1, where s is called u.
    """
    log_keep = math.log1p(-gamma) if gamma < 1.0 else -math.inf
    mixed = torch.logaddexp(log_s + log_keep, log_g + math.log(gamma))
    return torch.where(torch.isneginf(log_s), log_g, mixed)


def log_with_eps(log_s: Tensor, eps: float) -> Tensor:
    """Return log(s + eps). Source: FastCLIP eq 2-7; with eps = 0 it is log s, as in iSogCLR eq 13 and 14."""
    return torch.logaddexp(log_s, torch.full_like(log_s, math.log(eps))) if eps > 0.0 else log_s
