"""SogCLR (Yuan et al., ICML 2022; iSogCLR section 3), and what all global contrastive losses share with it.

That is the moving-average estimator s of each sample's inner value g, stored as log s: all log-domain formulas.
"""

import math
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from .base import Outcome, Progress, Settings, slope
from .contrastive import Anchors, Contrastive, DoubtSettings, Rows

SILENT = 0.01
"""Sum of an anchor's weights below which its features get next to no gradient; about 1 where s follows g."""


class AverageSettings(Settings, frozen=True):
    """Speed at which a moving average follows the batches."""

    gamma: float = Field(default=0.8, gt=0.0, le=1.0)
    """Weight of the new value in the average, in (0, 1]; 1 keeps no memory; unused with a cosine. iSogCLR eq 12, where
    it is beta_0."""
    gamma_schedule: Literal["constant", "cosine"] = "constant"
    """Whether the weight is `gamma`, or falls as a cosine from 1 to gamma_min. FastCLIP section 5."""
    gamma_min: float = Field(default=0.2, gt=0.0, le=1.0)
    """Final weight of the cosine, in (0, 1]."""
    gamma_decay_epochs: int | None = Field(default=None, ge=1)
    """Epochs (1 or more) in which the cosine falls; unset: half of the run's. FastCLIP Appendix B."""

    @model_validator(mode="after")
    def _has_a_cosine(self) -> Self:
        if self.gamma_decay_epochs is not None and self.gamma_schedule == "constant":
            raise ValueError("gamma_decay_epochs is of a cosine: set gamma_schedule to 'cosine'")
        return self

    def gamma_at(self, progress: Progress) -> float:
        """Return the weight of the new value in this step."""
        if self.gamma_schedule == "constant":
            return self.gamma
        return progress.cosine(1.0, self.gamma_min, self.gamma_decay_epochs or max(1, progress.epochs // 2))


class EstimatorSettings(AverageSettings, frozen=True):
    """Settings shared by all global contrastive objectives."""

    eps: float = Field(default=0.0, ge=0.0)
    """Added to s before division or logarithm, 0 or more. FastCLIP eq 2-7."""


class BoundedTau(Settings, frozen=True):
    """The range of a learned temperature."""

    tau_min: float = Field(default=0.005, ge=1e-4)
    """Lower bound after each update, 0.0001 or more (tau_0 of iSogCLR eq 7)."""
    tau_max: float = Field(default=1.0, gt=0.0, le=100.0)
    """Upper bound after each update, at most 100 and not below tau_min (iSogCLR algorithm 1, step 9)."""

    first_tau: ClassVar[str]
    """Name of the setting with the initial temperature."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        first = getattr(self, self.first_tau)
        if not self.tau_min <= first <= self.tau_max:
            raise ValueError(
                f"tau_min {self.tau_min} <= {self.first_tau} {first} <= tau_max {self.tau_max} does not hold; "
                f"move the bounds or {self.first_tau}"
            )
        return self


class Estimate(NamedTuple):
    """The estimator after a step, and values derived from it."""

    log_s: Tensor
    """[sides, b], new value."""
    log_s_eps: Tensor
    """[sides, b], log(s + eps)."""
    ratio: Tensor
    """[2, b], sum of each anchor's weights p: g / (s + eps). The gradient of tau · ratio · log_sum, tau and ratio held
    constant, is that of sum_j p_ij h_ij, p held constant: iSogCLR eq 14 and 21, FastCLIP eq 2-7."""
    exponent: Tensor
    """[sides, b], sum_j p_ij · h_ij / tau_i."""
    metrics: dict[str, Tensor]


class GlobalContrastive(Contrastive):
    """A loss on inner values of the whole dataset, estimated by a moving average s of each sample."""

    settings: EstimatorSettings

    def __init__(self, mode: str, settings: EstimatorSettings, **initial: float) -> None:
        """initial: as in Objective, besides log_s."""
        super().__init__(mode, settings, log_s=-math.inf, **initial)

    def estimate(self, anchors: Anchors, rows: Rows, progress: Progress) -> Estimate:
        """Update s from the anchors' sums.

        The weights use the new s, as FastCLIP and iSogCLR's code do. Source: iSogCLR eq 11, 12, 15-18; FastCLIP eq 1.
        """
        log_g = anchors.log_sum.detach() - math.log(anchors.candidates)
        log_s = update_log_s(rows["log_s"], self.pool_log(log_g), self.settings.gamma_at(progress))
        log_s_eps = log_with_eps(log_s, self.settings.eps)
        ratio = (log_g - log_s_eps).exp()
        exponent = self.pool(ratio * anchors.mean_exponent)
        silent, unseen = self.pool((ratio < SILENT).to(ratio.dtype)), share_unseen(rows["log_s"])
        metrics = self.by_side(log_s_mean=log_s.mean(1), share_unseen=unseen, share_silent=silent.mean(1))
        return Estimate(log_s, log_s_eps, ratio, exponent, metrics)

    def advice(self, batch_size: int, *, keys: bool = False) -> list[str]:
        """Warn of a rho, if there is one, that may never bind: KL from uniform is at most log(negatives).

        The average covers more than one batch: the papers slightly exceed this bound with batches of 1,024 and more.
        """
        rho, negatives = getattr(self.settings, "rho", None), (batch_size - 1) * (1 if keys or self.across else 2)
        if rho is None or rho < math.log(negatives):
            return []
        return [
            f"rho {rho} is not below log({negatives:,} negatives) = {math.log(negatives):.2f}: it may never bind, "
            "and every tau then falls to tau_min. Watch share_at_tau_min, lower rho, or raise the batch size."
        ]


def share_unseen(before: Tensor) -> Tensor:
    """Return the share of samples not seen before the step, [sides]; before: old log s, [sides, b]."""
    return torch.isneginf(before).to(before.dtype).mean(1)


def update_log_s(log_s: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """Move s toward this batch's inner value, in logs: s <- (1 - gamma) s + gamma g; s <- g if unseen.

    log_s, log_g: equal shapes; log_s is -inf for an unseen sample, log_g is finite. gamma in (0, 1] is the weight of
    the new value. Source: iSogCLR eq 12, 17, 18; FastCLIP eq 1, where s is called u.
    """
    log_keep = math.log1p(-gamma) if gamma < 1.0 else -math.inf
    mixed = torch.logaddexp(log_s + log_keep, log_g + math.log(gamma))
    return torch.where(torch.isneginf(log_s), log_g, mixed)


def log_g_rows(anchors: Anchors, rows: Rows) -> Rows:
    """Return the new log g, [2, b], of an objective that keeps it only for `doubt_after`; empty if that is unset."""
    if "log_g" not in rows:
        return {}
    return {"log_g": update_log_s(rows["log_g"], anchors.log_sum.detach() - math.log(anchors.candidates), 0.8)}


def log_with_eps(log_s: Tensor, eps: float) -> Tensor:
    """Return log(s + eps). Source: FastCLIP eq 2-7; with eps = 0 it is log s, as in iSogCLR eq 13 and 14."""
    return torch.logaddexp(log_s, torch.full_like(log_s, math.log(eps))) if eps > 0.0 else log_s


class SogclrSettings(EstimatorSettings, DoubtSettings, frozen=True):
    """Settings for image-text pairs."""

    tau: float = Field(default=0.03, ge=1e-4, le=100.0)
    """Temperature, 0.0001 to 100. The default is FastCLIP's for SogCLR (Appendix B)."""


class SogclrUnimodalSettings(SogclrSettings, frozen=True):
    """Settings for images."""

    tau: float = Field(default=0.1, ge=1e-4, le=100.0)
    """Temperature, 0.0001 to 100. iSogCLR tunes it in {0.1, 0.3, 0.5, 0.7} (section 6)."""


class Sogclr(GlobalContrastive):
    """The global contrastive loss with one constant temperature, bimodal or unimodal.

    Value: (1/b) sum over samples and sides of tau · log(s' + eps). The gradient of the features is that of
    (1/b) sum p_ij h_ij with the weights p held constant. State: log_s of each side.
    """

    settings_of_mode: ClassVar = {"bimodal": SogclrSettings, "unimodal": SogclrUnimodalSettings}

    keys: ClassVar[Literal["never", "optional", "always"]] = "optional"
    settings: SogclrSettings

    def temperature(self, rows: Rows, features: Tensor) -> Tensor:
        return torch.full_like(rows["log_s"], self.settings.tau)

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        est, tau = self.estimate(anchors, rows, progress), self.settings.tau
        loss = tau * anchors.mean(est.log_s_eps) + slope(tau * anchors.mean(est.ratio * anchors.log_sum))
        return Outcome(loss, {"log_s": est.log_s}, est.metrics)
