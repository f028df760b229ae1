"""iSogCLR: the robust global contrastive loss with a temperature per sample (Qiu et al., ICML 2023)."""

import math
from abc import abstractmethod
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from .base import Progress, Settings
from .contrastive import Anchors, Contrastive, Rows, Step
from .estimator import EstimatorSettings, estimate, estimate_metrics
from .temperatures import IndividualTau, advice_on_rho, individual_tau_metrics


class RobustSettings(EstimatorSettings, IndividualTau, frozen=True):
    """Settings shared by all losses with individual temperatures."""


class IsogclrSettings(RobustSettings, frozen=True):
    """Defaults from the paper's runs on image-text pairs, except rho."""

    beta_u: float = Field(default=0.9, gt=0.0, le=1.0)
    """Weight of the new gradient in u, in (0, 1]; 1 keeps no memory (beta_1 of iSogCLR algorithm 1)."""


class IsogclrUnimodalSettings(IsogclrSettings, frozen=True):
    """Defaults from the paper's runs on images, which need softer temperatures."""

    rho: float = Field(default=0.3, ge=0.0)
    """KL radius of the robust loss, 0 or more; 0.1 to 0.4 in the paper. iSogCLR eq 7."""
    tau_init: float = Field(default=0.7, gt=0.0)
    """Initial temperature of a sample; dimensionless, within tau_min and tau_max."""
    tau_min: float = Field(default=0.05, ge=1e-4)
    """Lower bound after each update, 0.0001 or more (tau_0 of iSogCLR eq 7)."""
    grad_clip: float = Field(default=3.0, gt=0.0)
    """Bound on the absolute temperature gradient before it enters u, above 0."""


class IndividualTemperature(Contrastive):
    """Robust global contrastive loss with individual temperatures; subclasses define how a temperature moves.

    Value: (1/b) sum over samples and sides of tau · (log(s' + eps) + rho). The gradient of the features is that of
    (1/b) sum p_ij h_ij with the weights p held constant (iSogCLR eq 14 and 21), not the derivative of the value.
    """

    settings: RobustSettings

    @abstractmethod
    def move(self, rows: Rows, gradient: Tensor, progress: Progress) -> Rows:
        """Return the new tau and its moving averages, [sides, b]; gradient: G, clipped."""

    def temperature(self, rows: Rows, like: Tensor) -> Tensor:
        return rows["tau"]

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        """iSogCLR eq 13, 19 and 20; FastCLIP eq 9. The step uses the old temperatures."""
        settings = self.settings
        est = estimate(self, anchors, rows["log_s"], settings, progress)
        gradient = est.log_s_eps + settings.rho - est.exponent
        moved = self.move(rows, gradient.clamp(-settings.grad_clip, settings.grad_clip), progress)
        weight = est.ratio * self.share(anchors)
        return Step(
            value=(rows["tau"] * (est.log_s_eps + settings.rho)).mean(1).sum(),
            negative_weight=weight,
            positive_weight=weight,
            rows={"log_s": est.log_s, **moved},
            metrics=individual_tau_metrics(self, moved["tau"], gradient, settings)
            | estimate_metrics(self, rows["log_s"], est.log_s),
        )

    def advice(self, batch_size: int) -> list[str]:
        return advice_on_rho(self, self.settings.rho, batch_size)


class Isogclr(IndividualTemperature):
    """iSogCLR, bimodal or unimodal.

    State: log_s, tau, u of each side: `image/…` and `text/…`, or, if unimodal, `sample/…`, shared by both views.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {
        "bimodal": IsogclrSettings,
        "unimodal": IsogclrUnimodalSettings,
    }

    settings: IsogclrSettings

    def __init__(self, mode: str, settings: IsogclrSettings) -> None:
        super().__init__(mode, settings, log_s=-math.inf, tau=settings.tau_init, u=0.0)

    def move(self, rows: Rows, gradient: Tensor, progress: Progress) -> Rows:
        """iSogCLR algorithm 1."""
        settings = self.settings
        u = (1.0 - settings.beta_u) * rows["u"] + settings.beta_u * gradient
        tau = (rows["tau"] - settings.eta_at(progress) * u).clamp(settings.tau_min, settings.tau_max)
        return {"tau": tau, "u": u}
