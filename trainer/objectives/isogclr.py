"""iSogCLR: the robust global contrastive loss with a temperature per sample (Qiu et al., ICML 2023).

The algorithm in thirty lines is in reference.py; s, eq 12, 17 and 18, is moved in sogclr.py.
"""

import math
from abc import abstractmethod
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...pipeline.dataset.index import Content
from .base import Outcome, Progress, slope
from .contrastive import Anchors, DoubtSettings, Rows
from .sogclr import BoundedTau, EstimatorSettings, GlobalContrastive


class IndividualTau(BoundedTau, frozen=True):
    """A temperature for every sample and side."""

    first_tau: ClassVar[str] = "tau_init"

    tau_init: float = Field(default=0.05, gt=0.0)
    """Initial temperature of a sample; dimensionless, within tau_min and tau_max; 0.01 in iSogCLR's runs on pairs."""
    rho: float = Field(default=1.0, ge=0.0)
    """KL radius of the robust loss, 0 or more. From about log(number of negatives) on it may never bind, and every
    tau falls to tau_min. 1.0 suits 256 pairs; the papers use 5.8 to 9 with 512 pairs and more, 16.0 with 315 million.
    iSogCLR eq 7; FastCLIP table 9."""
    eta: float = Field(default=0.005, ge=0.0)
    """Step size of tau, 0 or more; 0 keeps every tau constant. Includes the 1/n of iSogCLR eq 13; 0.01 in its runs."""
    eta_min: float = Field(default=0.0, ge=0.0)
    """Final eta of the cosine, in [0, eta]; used only with eta_decay_epochs."""
    eta_decay_epochs: int | None = Field(default=None, ge=1)
    """Epochs, 1 or more, over which eta falls as a cosine to eta_min; unset: constant."""
    grad_clip: float = Field(default=5.0, gt=0.0)
    """Bound on the absolute temperature gradient before it enters the moving averages, above 0."""
    tau_step: float | None = Field(default=None, gt=0.0)
    """Trust region: a step changes tau by a factor between exp(-tau_step) and exp(tau_step); unset: as in the papers.
    One step of the papers' rule may take a sample to tau_min, where its s, estimated at another tau, is far above any
    batch's g: the sample then gives its features no gradient for tens of visits. Ours."""

    @model_validator(mode="after")
    def _cosine_falls(self) -> Self:
        if self.eta_decay_epochs is not None and self.eta_min > self.eta:
            raise ValueError(f"eta_min {self.eta_min} is above eta {self.eta}; lower eta_min")
        return self

    def eta_at(self, progress: Progress) -> float:
        """Return the step size of tau in this step."""
        if self.eta_decay_epochs is None:
            return self.eta
        return progress.cosine(self.eta, self.eta_min, self.eta_decay_epochs)

    def stepped(self, tau: Tensor, step: Tensor) -> Tensor:
        """Return tau + step, limited by tau_step, tau_min and tau_max; any equal shapes."""
        moved = tau + step
        if self.tau_step is not None:
            moved = tau * (step / tau).clamp(-self.tau_step, self.tau_step).exp()
        return moved.clamp(self.tau_min, self.tau_max)


class RobustSettings(EstimatorSettings, IndividualTau, DoubtSettings, frozen=True):
    """Settings shared by all losses with individual temperatures."""


class IsogclrSettings(RobustSettings, frozen=True):
    """Defaults for batches of some hundred pairs.

    With the paper's tau_init and eta the first step takes every tau to tau_min: of 39,200 icons 87 % stayed there.
    """

    beta_u: float = Field(default=0.9, gt=0.0, le=1.0)
    """Weight of the new gradient in u, in (0, 1]; 1 keeps no memory (beta_1 of iSogCLR algorithm 1)."""


class IsogclrUnimodalSettings(IsogclrSettings, frozen=True):
    """Defaults from the paper's runs on images, which need softer temperatures."""

    rho: float = Field(default=0.3, ge=0.0)
    """KL radius of the robust loss, 0 or more; 0.1 to 0.4 in the paper. iSogCLR eq 7."""
    tau_init: float = Field(default=0.7, gt=0.0)
    """Initial temperature of a sample; dimensionless, within tau_min and tau_max."""
    eta: float = Field(default=0.01, ge=0.0)
    """Step size of tau, 0 or more; 0 keeps every tau constant. Includes the 1/n of iSogCLR eq 13."""
    tau_min: float = Field(default=0.05, ge=1e-4)
    """Lower bound after each update, 0.0001 or more (tau_0 of iSogCLR eq 7)."""
    grad_clip: float = Field(default=3.0, gt=0.0)
    """Bound on the absolute temperature gradient before it enters u, above 0."""


class IndividualTemperature(GlobalContrastive):
    """Robust global contrastive loss with individual temperatures; subclasses define how a temperature moves.

    Value: (1/b) sum over samples and sides of tau · (log(s' + eps) + rho). The gradient of the features is that of
    (1/b) sum p_ij h_ij with the weights p held constant (iSogCLR eq 14 and 21), not the derivative of the value.
    """

    settings: RobustSettings

    averages: ClassVar[dict[str, float]] = {}
    """Moving averages that `move` keeps beside each temperature, with their initial values."""

    def __init__(self, mode: str, settings: RobustSettings) -> None:
        super().__init__(mode, settings, tau=settings.tau_init, **self.averages)

    @abstractmethod
    def move(self, rows: Rows, gradient: Tensor, progress: Progress) -> Rows:
        """Return the new tau and its `averages`, [sides, b]; gradient: G, clipped."""

    def temperature(self, rows: Rows, features: Tensor) -> Tensor:
        return rows["tau"]

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        """iSogCLR eq 13, 19 and 20; FastCLIP eq 9. The step uses the old temperatures."""
        settings = self.settings
        est = self.estimate(anchors, rows, progress)
        gradient = est.log_s_eps + settings.rho - est.exponent  # FastCLIP eq 9, without 1/n and with the new s
        moved = self.move(rows, gradient.clamp(-settings.grad_clip, settings.grad_clip), progress)
        if anchors.doubted is not None:
            # Otherwise tau would fall to its floor, where a single near negative maintains the doubt.
            moved = {name: torch.where(anchors.doubted, rows[name], values) for name, values in moved.items()}
        tau = moved["tau"]
        metrics = self.by_side(
            tau_mean=tau.mean(1),
            tau_lowest=tau.amin(1),
            tau_highest=tau.amax(1),
            share_at_tau_min=(tau <= settings.tau_min).to(tau.dtype).mean(1),
            share_at_tau_max=(tau >= settings.tau_max).to(tau.dtype).mean(1),
            tau_gradient_mean_abs=gradient.abs().mean(1),
        )
        # eq 14, 21: its gradient is sum_j p_ij ∇h_ij: tau · log_sum has the softmax's, and p is ratio · softmax.
        pull = anchors.mean(est.ratio * rows["tau"] * anchors.log_sum)
        loss = anchors.mean(rows["tau"] * (est.log_s_eps + settings.rho)) + slope(pull)  # eq 7
        return Outcome(loss, {"log_s": est.log_s, **moved}, metrics | est.metrics)

    def advice_on_repeats(self, content: Content) -> list[str]:
        """Warn of a caption or picture shared by so many samples that rho cannot bind for them.

        With a share c of negatives as close as the positive, the KL divergence of weights is at most log(1/c).
        """
        thin = "thin the copies (`thermopile inspect --duplicates`, then `curate --thin`)"
        repeats = [("the same picture", content.most_copied, thin)]
        if self.across:
            caption = f"the caption of sample {content.caption_sample}"
            repeats.append((caption, content.with_caption, "give different pictures captions of their own"))
        bound = math.exp(-self.settings.rho)
        return [
            f"{share:.1%} of the dataset's samples have {what}, more than exp(-rho) = {bound:.1%}: rho cannot bind for "
            f"them, so their temperatures fall to tau_min, and they will be called crowded. To change that, {cure}"
            # Below, weights are nearly uniform, so such a rho is not advised.
            + (f", or set objective.rho below log(1/share) = {most:.2f}" if (most := -math.log(share)) >= 0.05 else "")
            for what, count, cure in repeats
            if (share := count / content.samples) > bound
        ]


class Isogclr(IndividualTemperature):
    """iSogCLR, bimodal or unimodal.

    State: log_s, tau, u of each side: `image/…` and `text/…`, or, if unimodal, `sample/…`, shared by both views.
    """

    settings_of_mode: ClassVar = {"bimodal": IsogclrSettings, "unimodal": IsogclrUnimodalSettings}

    keys = "optional"
    averages: ClassVar[dict[str, float]] = {"u": 0.0}
    settings: IsogclrSettings

    def move(self, rows: Rows, gradient: Tensor, progress: Progress) -> Rows:
        """iSogCLR algorithm 1."""
        settings = self.settings
        u = (1.0 - settings.beta_u) * rows["u"] + settings.beta_u * gradient
        return {"tau": settings.stepped(rows["tau"], -settings.eta_at(progress) * u), "u": u}
