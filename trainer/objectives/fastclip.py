"""FastCLIP-v0 to v3: global contrastive losses of image-text pairs with four rules for tau (Wei et al., 2024).

Feature gradients follow the paper's equations. The authors' code halves them, and omits individual temperatures' tau_i.
"""

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from .base import Outcome, Progress, TemperatureRate, scalar_parameter, slope
from .contrastive import Anchors, DoubtSettings, Rows
from .isogclr import IndividualTemperature, RobustSettings
from .sogclr import BoundedTau, Estimate, EstimatorSettings, GlobalContrastive, Sogclr, SogclrSettings

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class FastclipSettings(EstimatorSettings, DoubtSettings, frozen=True):
    """Settings shared by the four versions, of which the cosine of gamma is part (table 1)."""

    gamma_schedule: Literal["constant", "cosine"] = "cosine"
    """Whether gamma falls as a cosine from 1 to gamma_min, as FastCLIP's does, or is constant, as its rivals' is: v1 is
    then SogCLR, v2 iSogCLR by Adam, v3 the row "constant" of table 3."""

    eps: float = Field(default=1e-14, ge=0.0)
    """Added to s before division or logarithm, 0 or more. FastCLIP eq 2-7; Appendix D uses 1e-14, and 1e-6 for 315
    million samples."""


class GlobalTau(BoundedTau, frozen=True):
    first_tau: ClassVar[str] = "tau"

    tau: float = Field(default=0.03, gt=0.0)
    """Initial temperature; dimensionless, within tau_min and tau_max."""
    tau_min: float = Field(default=0.01, ge=1e-4)
    """Lower bound after each update, 0.0001 or more. The authors' code."""
    tau_scale: Literal["log", "plain"] = "log"
    """What the optimiser moves: the log of tau, as in the authors' code, whose rates Appendix B has; or tau itself, in
    which a step of AdamW at the same rate is 1/tau times as long: 14 times at 0.07."""


class FastclipV0Settings(FastclipSettings, GlobalTau, frozen=True):
    """Settings of version 0."""

    eta: float | None = Field(default=None, ge=0.0)
    """Learning rate of tau, 0 or more; 0 keeps it constant; unset: that of the encoders, with its warm-up and cosine,
    as in the authors' code."""


class FastclipV1Settings(FastclipSettings, SogclrSettings, frozen=True):
    """Settings of version 1."""


class FastclipV2Settings(FastclipSettings, RobustSettings, frozen=True):
    """Settings of version 2."""

    tau_init: float = Field(default=0.03, gt=0.0)
    """Initial temperature of a sample; dimensionless, within tau_min and tau_max. FastCLIP Appendix B."""
    tau_min: float = Field(default=0.01, ge=1e-4)
    """Lower bound after each update, 0.0001 or more. The authors' code."""
    eta: float = Field(default=0.01, ge=0.0)
    """Adam's learning rate of tau, 0 or more; 0 keeps every tau constant. FastCLIP procedure 5."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Adam's betas for every tau; each in [0, 1). FastCLIP procedure 5."""


class FastclipV3Settings(FastclipSettings, GlobalTau, frozen=True):
    tau: float = Field(default=0.07, gt=0.0)
    """Initial temperature; dimensionless, within tau_min and tau_max. FastCLIP Appendix B."""
    eta: float = Field(default=2e-4, ge=0.0)
    """Learning rate of tau, 0 or more; 0 keeps tau constant. FastCLIP Appendix B; by `tau_scale`."""
    rho: float = Field(default=2.0, ge=0.0)
    """KL radius of the robust loss, 0 or more, below log(number of negatives). 2.0 suits 256 pairs; the paper uses 6.5
    for 1,024. FastCLIP table 9."""


class _GlobalTemperature(GlobalContrastive):
    """A learned global temperature, the parameter `log_tau` or `tau`, clamped to [tau_min, tau_max] when used."""

    settings: FastclipV0Settings | FastclipV3Settings
    doubt_keeps_mean = True
    slow_below: ClassVar[float | None] = None

    def __init__(self, mode: str, settings: FastclipV0Settings | FastclipV3Settings) -> None:
        super().__init__(mode, settings)
        if settings.tau_scale == "log":
            self.log_tau = scalar_parameter(math.log(settings.tau))
        else:
            self.tau = scalar_parameter(settings.tau)
        if settings.eta is not None:
            slow_below = None if self.slow_below is None else self._scaled(self.slow_below)
            self.temperature_rate = TemperatureRate(settings.eta, slow_below)

    def _scaled(self, tau: float) -> float:
        """Return a temperature as the parameter has it."""
        return math.log(tau) if self.settings.tau_scale == "log" else tau

    def project(self) -> None:
        for parameter in self.parameters():
            parameter.clamp_(self._scaled(self.settings.tau_min), self._scaled(self.settings.tau_max))

    def temperature(self, rows: Rows, features: Tensor) -> Tensor:
        # A copy, since `project` writes.
        tau = self.log_tau.exp() if self.settings.tau_scale == "log" else self.tau.clone()
        return tau.to(features).expand_as(rows["log_s"])

    def metrics_of(self, est: Estimate, tau: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """tau, gradient: the temperature and the loss's gradient in it, scalars."""
        return {"tau": tau.detach().clone(), "tau_gradient": gradient} | est.metrics


class FastclipV0(_GlobalTemperature):
    """Unscaled global contrastive loss with one learned temperature.

    Value: (1/b) sum over samples and sides of log(s' + eps). Gradient in tau: FastCLIP eq 8. State: log_s of each side.
    """

    settings_of_mode: ClassVar = {"bimodal": FastclipV0Settings}
    settings: FastclipV0Settings

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        est, tau = self.estimate(anchors, rows, progress), anchors.tau[0, 0]
        pull = anchors.mean(est.ratio * anchors.log_sum)  # in tau: eq 8
        loss = anchors.mean(est.log_s_eps) + slope(pull)
        gradient = -anchors.mean(est.exponent) / tau  # the same, as a metric
        return Outcome(loss, {"log_s": est.log_s}, self.metrics_of(est, tau, gradient))


class FastclipV1(Sogclr):
    """Global contrastive loss with one constant temperature: SogCLR on image-text pairs with FastCLIP's settings."""

    settings_of_mode: ClassVar = {"bimodal": FastclipV1Settings}
    keys = "never"  # SogCLR's unimodal mode takes keys


class FastclipV2(IndividualTemperature):
    """iSogCLR's loss, with each temperature moved by its own Adam.

    Adam's bias correction counts the sample's own visits. The paper's procedure 5 uses the global step and its code the
    epoch; both are wrong for a sample first seen late. The gradient is clipped before Adam, as in the code; the paper
    does not mention clipping. State: log_s, tau, m, v of each side.
    """

    settings_of_mode: ClassVar = {"bimodal": FastclipV2Settings}
    reads_visits = True
    averages: ClassVar[dict[str, float]] = {"m": 0.0, "v": 0.0}
    settings: FastclipV2Settings

    def move(self, rows: Rows, gradient: Tensor, progress: Progress) -> Rows:
        """FastCLIP procedure 5."""
        (b1, b2), visits = self.settings.betas, rows["visits"] + 1
        m = b1 * rows["m"] + (1 - b1) * gradient
        v = b2 * rows["v"] + (1 - b2) * gradient.square()
        step = (m / _correction(b1, visits)) / ((v / _correction(b2, visits)).sqrt() + 1e-8)
        return {"tau": self.settings.stepped(rows["tau"], -self.settings.eta_at(progress) * step), "m": m, "v": v}


def _correction(beta: float, visits: Tensor) -> Tensor:
    """Return 1 - beta^visits, accurate in float32 for beta near 1."""
    return -torch.expm1(visits * math.log(beta)) if beta else torch.ones_like(visits)


class FastclipV3(_GlobalTemperature):
    """Robust global contrastive loss with one learned temperature.

    Value: (1/b) sum over samples and sides of tau · log(s' + eps), plus 2 · rho · tau. Gradient in tau: FastCLIP eq 10.
    State: log_s of each side.
    """

    settings_of_mode: ClassVar = {"bimodal": FastclipV3Settings}
    settings: FastclipV3Settings
    slow_below = 0.03

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        est, tau, rho = self.estimate(anchors, rows, progress), anchors.tau[0, 0], self.settings.rho
        pull = anchors.mean(est.ratio * tau.detach() * anchors.log_sum)
        loss = tau * (anchors.mean(est.log_s_eps) + 2 * rho) + slope(pull)  # its gradient in tau: eq 10
        gradient = anchors.mean(est.log_s_eps - est.exponent) + 2 * rho  # eq 10 again, as a metric
        return Outcome(loss, {"log_s": est.log_s}, self.metrics_of(est, tau, gradient))
