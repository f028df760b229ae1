"""Shared parts of objectives that learn temperatures: bounds, metrics, and a warning about rho."""

import math
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from .base import Progress, Settings
from .contrastive import Contrastive
from .schedules import cosine_by_epoch

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


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


class IndividualTau(BoundedTau, frozen=True):
    """A temperature for every sample and side."""

    first_tau: ClassVar[str] = "tau_init"

    tau_init: float = Field(default=0.01, gt=0.0)
    """Initial temperature of a sample; dimensionless, within tau_min and tau_max."""
    rho: float = Field(default=2.0, ge=0.0)
    """KL radius of the robust loss, 0 or more. From about log(number of negatives) on it may never bind, and every
    tau falls to tau_min. 2.0 suits 256 pairs; the papers use 5.8 to 9 with 512 pairs and more. iSogCLR eq 7."""
    eta: float = Field(default=0.01, ge=0.0)
    """Step size of tau, 0 or more; 0 keeps every tau constant. Includes the 1/n of iSogCLR eq 13."""
    eta_min: float = Field(default=0.0, ge=0.0)
    """Final eta of the cosine, in [0, eta]; used only with eta_decay_epochs."""
    eta_decay_epochs: int | None = Field(default=None, ge=1)
    """Epochs, 1 or more, over which eta falls as a cosine to eta_min; unset: constant."""
    grad_clip: float = Field(default=5.0, gt=0.0)
    """Bound on the absolute temperature gradient before it enters the moving averages, above 0."""

    @model_validator(mode="after")
    def _cosine_falls(self) -> Self:
        if self.eta_decay_epochs is not None and self.eta_min > self.eta:
            raise ValueError(f"eta_min {self.eta_min} is above eta {self.eta}; lower eta_min")
        return self

    def eta_at(self, progress: Progress) -> float:
        """Return the step size of tau in this step."""
        if self.eta_decay_epochs is None:
            return self.eta
        return cosine_by_epoch(progress, self.eta, self.eta_min, self.eta_decay_epochs)


class GlobalTau(BoundedTau, frozen=True):
    """One learned temperature."""

    first_tau: ClassVar[str] = "tau"

    tau: float = Field(default=0.03, gt=0.0)
    """Initial temperature; dimensionless, within tau_min and tau_max."""
    eta: float = Field(default=1e-3, ge=0.0)
    """Learning rate of tau, 0 or more; 0 keeps it constant. FastCLIP tunes it in [1e-4, 1e-2] (Appendix B)."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Adam's betas for tau; each in [0, 1)."""


def scalar_parameter(value: float) -> nn.Parameter:
    """Return a learnable scalar in float64, so that its initial value is exact even for features in float64."""
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def individual_tau_metrics(
    objective: Contrastive, tau: Tensor, gradient: Tensor, settings: IndividualTau
) -> dict[str, Tensor]:
    """Return metrics of the new temperatures and their gradients G before clipping, both [sides, b]."""
    return objective.by_side(
        tau_mean=tau.mean(1),
        tau_lowest=tau.amin(1),
        tau_highest=tau.amax(1),
        share_at_tau_min=(tau <= settings.tau_min).to(tau.dtype).mean(1),
        share_at_tau_max=(tau >= settings.tau_max).to(tau.dtype).mean(1),
        tau_gradient_mean_abs=gradient.abs().mean(1),
    )


def advice_on_rho(objective: Contrastive, rho: float, batch_size: int) -> list[str]:
    """Warn of a rho that may never bind: the KL divergence of weights from uniform is at most log(negatives).

    The moving average covers more than one batch, so the papers exceed that a little with batches of 1,024 and more.
    """
    negatives = objective.candidates(batch_size)
    if rho < math.log(negatives):
        return []
    return [
        f"rho {rho} is not below log({negatives:,} negatives) = {math.log(negatives):.2f}: it may never bind, "
        "and every tau then falls to tau_min. Watch share_at_tau_min, lower rho, or raise the batch size."
    ]
