"""TempNet: the robust global contrastive loss whose temperatures a small network predicts (Qiu et al., ICML 2024).

Follows the authors' code (github.com/zhqiu/TempNet, Bimodal_CL, iSogCLR_TempNet_Loss), which is for image-text pairs;
its mode for images is ours. Differences: docs/method.md.
"""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from .base import Computed, Progress, Settings, TemperatureRate
from .contrastive import Anchors, Rows, Step
from .estimator import EstimatorSettings, GlobalContrastive
from .gathering import GlobalBatch
from .pairs import Pairs
from .temperature_network import TemperatureNetwork


class TempnetSettings(EstimatorSettings, frozen=True):
    """Defaults from the authors' run on CC3M, except rho, which is 7.0 there, with 2,048 pairs."""

    rho: float = Field(default=2.0, ge=0.0)
    """KL radius of the robust loss, 0 or more. From about log(number of negatives) on it may never bind, and every tau
    falls towards tau_min. 2.0 suits 256 pairs."""
    tau_min: float = Field(default=0.005, ge=1e-4)
    """Lower end of the predicted range, 0.0001 or more."""
    tau_max: float = Field(default=0.05, gt=0.0, le=100.0)
    """Upper end of the predicted range, above tau_min and at most 100. Before training, tau is near the middle."""
    prototypes: int = Field(default=256, ge=2)
    """Prototypes that features are compared with, 2 or more."""
    dropout: float = Field(default=0.5, ge=0.0, lt=1.0)
    """Share of the transformed features that a step drops, in [0, 1)."""
    eta: float = Field(default=3e-5, ge=0.0)
    """Learning rate of the network's own Adam, 0 or more; warm-up and cosine of the encoders' rate do not apply."""
    eta_decay: float = Field(default=0.9, gt=0.0, le=1.0)
    """Factor of eta from one epoch to the next, in (0, 1]."""
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    """Adam's betas for the network; each in [0, 1)."""
    width: int = Field(default=256, ge=1)
    """Numbers per feature, 1 or more; `thermopile train` sets it to model.dim."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the network's initial weights and, with the step, of dropout: 0 to 2³¹ - 1."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.tau_min >= self.tau_max:
            raise ValueError(f"tau_min {self.tau_min} is not below tau_max {self.tau_max}; move one of them")
        return self


class TempnetUnimodalSettings(TempnetSettings, frozen=True):
    """Settings for images: iSogCLR's range of tau and rho for them, the rest as for pairs."""

    rho: float = Field(default=0.3, ge=0.0)
    """KL radius of the robust loss, 0 or more; iSogCLR uses 0.1 to 0.4 for images."""
    tau_min: float = Field(default=0.05, ge=1e-4)
    """Lower end of the predicted range, 0.0001 or more."""
    tau_max: float = Field(default=1.0, gt=0.0, le=100.0)
    """Upper end of the predicted range, above tau_min and at most 100. Before training, tau is near the middle."""


class Tempnet(GlobalContrastive):
    """iSogCLR's loss, bimodal or unimodal, with temperatures predicted from the features by a network for each side.

    A run's first step puts the networks' prototypes at the other side's (or view's) features.

    Value and gradient of the features are iSogCLR's at the predicted temperatures, held constant, as are the features
    that the network reads. The network's gradient is that of (1/b) sum over samples and sides of G_i tau_i, with G_i,
    the derivative of the value in tau_i, held constant: log(s' + eps) + rho - sum_j p_ij h_ij / tau_i (iSogCLR eq 13).
    Unimodal: a sample's tau is the mean of those predicted from its two views.
    State: log_s and tau of each side; tau is the value used in the sample's last step, and no step reads it.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {
        "bimodal": TempnetSettings,
        "unimodal": TempnetUnimodalSettings,
    }

    predicts = True
    takes_weights = False  # nobody has defined the effect of a weight on the network's gradient
    settings: TempnetSettings

    def __init__(self, mode: str, settings: TempnetSettings) -> None:
        super().__init__(mode, settings, log_s=-math.inf, tau=(settings.tau_min + settings.tau_max) / 2)
        generator, shape = torch.Generator().manual_seed(settings.seed), (settings.width, settings.prototypes)
        networks = {
            side: TemperatureNetwork(*shape, settings.tau_min, settings.tau_max, generator) for side in self.sides
        }
        self.networks = nn.ModuleDict(networks)
        self.temperature_rate = TemperatureRate(settings.eta, settings.betas, decay=settings.eta_decay)

    def predict(self, side: str, features: Tensor) -> Tensor:
        with torch.no_grad():
            predicted: Tensor = self._network(side)(features)
        return predicted

    def temperature(self, rows: Rows, like: Tensor) -> Tensor:
        return rows["tau"]

    def compute(self, pairs: Pairs, batch: GlobalBatch, state: Mapping[str, Tensor], progress: Progress) -> Computed:
        """Each rank predicts its own samples' tau; the ranks sum their shares of the network's gradient."""
        if (given := pairs.features.shape[2]) != self.settings.width:
            raise ValueError(
                f"objective 'tempnet': features have {given} numbers, but width is {self.settings.width}; "
                "make it the features'"
            )
        if progress.step == 0:  # an image network's at the captions, and vice versa, as in the authors' code
            for side, features in zip(self.sides, pairs.features.flip(0), strict=False):
                self._network(side).start_at(features)
        with torch.enable_grad():
            tau = self._predicted(pairs, progress)
        of_side = {f"{side}/tau": values for side, values in zip(self.sides, tau.detach(), strict=True)}
        computed = super().compute(pairs, batch, {**state, **of_side}, progress)
        (of_tau,) = computed.parameter_gradients  # for the whole batch, as `compute_step` returns it
        parameters = list(self.parameters())
        own = torch.autograd.grad(tau, parameters, of_tau[:, pairs.own])
        summed = batch.sum(torch.cat([gradient.flatten() for gradient in own]))
        parts = torch.split(summed, [parameter.numel() for parameter in parameters])
        computed.parameter_gradients = [
            part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)
        ]
        computed.state |= {name: values.to(state[name].dtype) for name, values in of_side.items()}
        return computed

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        """Return the gradient of the temperatures, [sides, b], in place of the parameters'."""
        est, tau = self.estimate(anchors, rows, progress), rows["tau"]
        gradient = est.log_s_eps + self.settings.rho - est.exponent
        metrics = self.by_side(
            tau_mean=tau.mean(1),
            tau_lowest=tau.amin(1),
            tau_highest=tau.amax(1),
            tau_gradient_mean_abs=gradient.abs().mean(1),
        )
        value = (tau * (est.log_s_eps + self.settings.rho)).mean(1).sum()
        return Step(
            value,
            est.weight,
            rows={"log_s": est.log_s},
            parameter_gradients=[gradient / tau.shape[1]],
            metrics=metrics | est.metrics,
        )

    def advice(self, batch_size: int, *, keys: bool = False) -> list[str]:
        return self.advice_on_rho(self.settings.rho, batch_size)

    def _network(self, side: str) -> TemperatureNetwork:
        return cast("TemperatureNetwork", self.networks[side])

    def _predicted(self, pairs: Pairs, progress: Progress) -> Tensor:
        """Return the temperatures of this rank's samples, [sides, n], with dropout."""
        features = pairs.features[:, pairs.own]
        kept = self._kept(pairs.features, progress)[:, pairs.own]
        networks = [self._network(side) for side in (self.sides * 2)[:2]]
        of_features = torch.stack([network(*given) for network, *given in zip(networks, features, kept, strict=True)])
        return self.pool(of_features)

    def _kept(self, features: Tensor, progress: Progress) -> Tensor:
        """Return dropout's factors of the global batch, [2, b, d]; the same on every rank and after a resume."""
        keep, generator = 1.0 - self.settings.dropout, _generator(self.settings.seed, progress.step, features.device)
        # Not empty_like: the memory layout of gathered features, the order of drawing, depends on the ranks.
        drawn = torch.empty(features.shape, dtype=features.dtype, device=features.device)
        return drawn.bernoulli_(keep, generator=generator).div_(keep)


def _generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    # Hashed, because a CPU generator uses only 32 bits of its seed.
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence((seed, step)).generate_state(1)[0]))
