"""FastCLIP-v0 to v3: the global contrastive losses of image-text pairs with four rules for tau (Wei et al., 2024).

Feature gradients are those of the paper's equations; the authors' code halves them, and leaves out the factor tau_i
where temperatures are individual.
"""

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .base import Progress, Settings, TemperatureRate
from .contrastive import Anchors, Contrastive, Rows, Step
from .estimator import Estimate, EstimatorSettings, estimate, estimate_metrics
from .isogclr import IndividualTemperature, RobustSettings
from .sogclr import Sogclr, SogclrSettings
from .temperatures import Beta, GlobalTau, advice_on_rho, scalar_parameter


class FastclipSettings(EstimatorSettings, frozen=True):
    """What the four versions have in common."""

    eps: float = Field(default=1e-14, ge=0.0)
    """Added to s where it is divided by or its log taken, 0 or more. FastCLIP eq 2-7; Appendix D has 1e-14, and 1e-6 at
    315 million samples."""


class FastclipV0Settings(FastclipSettings, GlobalTau, frozen=True):
    """Settings of version 0."""


class FastclipV1Settings(FastclipSettings, SogclrSettings, frozen=True):
    """Settings of version 1."""


class FastclipV2Settings(FastclipSettings, RobustSettings, frozen=True):
    """Settings of version 2; `eta` is Adam's learning rate."""

    tau_init: float = Field(default=0.03, gt=0.0)
    """Temperature of a sample not seen before; dimensionless, within tau_min and tau_max. FastCLIP Appendix B."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Adam's, for every tau; each in [0, 1). FastCLIP procedure 4."""


class FastclipV3Settings(FastclipSettings, GlobalTau, frozen=True):
    """Settings of version 3."""

    tau: float = Field(default=0.07, gt=0.0)
    """First temperature; dimensionless, within tau_min and tau_max. FastCLIP Appendix B."""
    eta: float = Field(default=2e-4, ge=0.0)
    """Learning rate of tau, 0 or more; 0 holds it where it is. FastCLIP Appendix B."""
    rho: float = Field(default=2.0, ge=0.0)
    """KL radius of the robust loss, 0 or more, below log(number of negatives). 2.0 suits 256 pairs; the paper has 6.5
    with 1,024. FastCLIP section 4."""


class _GlobalTemperature(Contrastive):
    """A learned global `tau`, in use within [tau_min, tau_max]."""

    def __init__(self, mode: str, settings: GlobalTau, *, slow_below: float | None) -> None:
        super().__init__(mode, settings, log_s=-math.inf)
        self.tau = scalar_parameter(settings.tau)
        self.temperature_rate = TemperatureRate(settings.eta, settings.betas, slow_below)
        self._bounds = settings.tau_min, settings.tau_max

    def project(self) -> None:
        self.tau.clamp_(*self._bounds)

    def temperature(self, rows: Rows, like: Tensor) -> Tensor:
        return self.tau.to(like).expand_as(rows["log_s"])

    def learn(self, value: Tensor, force: Tensor, gradient: Tensor, rows: Rows, est: Estimate) -> Step:
        """The step that moves tau by `gradient`, a scalar."""
        metrics = {"tau": self.tau.detach().clone(), "tau_gradient": gradient}
        return Step(
            value=value,
            push=force,
            pull=force,
            rows={"log_s": est.log_s},
            parameter_gradients=[gradient],
            metrics=metrics | estimate_metrics(self, rows["log_s"], est.log_s),
        )


class FastclipV0(_GlobalTemperature):
    """Unscaled global contrastive loss with one learned temperature.

    Value: (1/b) sum over samples and sides of log(s' + eps). Gradient in tau: FastCLIP eq 8. State: log_s of each side.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": FastclipV0Settings}
    settings: FastclipV0Settings

    def __init__(self, mode: str, settings: FastclipV0Settings) -> None:
        super().__init__(mode, settings, slow_below=None)

    def react(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        est = estimate(self, anchors, rows["log_s"], self.settings, progress)
        tau = anchors.tau[0, 0]
        force = est.ratio * self.share(anchors) / tau
        return self.learn(est.log_s_eps.mean(1).sum(), force, -est.exponent.mean(1).sum() / tau, rows, est)


class FastclipV1(Sogclr):
    """Global contrastive loss with one constant temperature: SogCLR's on image-text pairs, with FastCLIP's settings."""

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": FastclipV1Settings}


class FastclipV2(IndividualTemperature):
    """iSogCLR's loss, each temperature moved by an Adam of its own.

    Adam's corrections go by the sample's own visits: the paper's procedure 4 writes the global step, its code takes the
    epoch, and either is wrong for a sample that comes late. The gradient is clipped first, which the code does and the
    paper does not say. State: log_s, tau, m, v of each side.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": FastclipV2Settings}
    reads_visits = True
    settings: FastclipV2Settings

    def __init__(self, mode: str, settings: FastclipV2Settings) -> None:
        super().__init__(mode, settings, log_s=-math.inf, tau=settings.tau_init, m=0.0, v=0.0)

    def move(self, rows: Rows, gradient: Tensor, progress: Progress) -> Rows:
        """FastCLIP procedure 4."""
        (b1, b2), visits = self.settings.betas, rows["visits"] + 1
        m = b1 * rows["m"] + (1 - b1) * gradient
        v = b2 * rows["v"] + (1 - b2) * gradient.square()
        step = (m / _correction(b1, visits)) / ((v / _correction(b2, visits)).sqrt() + 1e-8)
        tau = (rows["tau"] - self.settings.eta_at(progress) * step).clamp(self.settings.tau_min, self.settings.tau_max)
        return {"tau": tau, "m": m, "v": v}


def _correction(beta: float, visits: Tensor) -> Tensor:
    """1 - beta^visits, exact in float32 where beta is near 1."""
    return -torch.expm1(visits * math.log(beta)) if beta else torch.ones_like(visits)


class FastclipV3(_GlobalTemperature):
    """Robust global contrastive loss with one learned temperature.

    Value: (1/b) sum over samples and sides of tau · log(s' + eps), plus 2 · rho · tau. Gradient in tau: FastCLIP eq 10.
    State: log_s of each side.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"bimodal": FastclipV3Settings}
    settings: FastclipV3Settings

    def __init__(self, mode: str, settings: FastclipV3Settings) -> None:
        super().__init__(mode, settings, slow_below=0.03)

    def react(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        est = estimate(self, anchors, rows["log_s"], self.settings, progress)
        tau, rho = anchors.tau[0, 0], self.settings.rho
        value = tau * (est.log_s_eps.mean(1).sum() + 2 * rho)
        gradient = (est.log_s_eps - est.exponent).mean(1).sum() + 2 * rho
        return self.learn(value, est.ratio * self.share(anchors), gradient, rows, est)

    def advice(self, batch_size: int) -> list[str]:
        return advice_on_rho(self, self.settings.rho, batch_size)
