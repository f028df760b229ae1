"""CLIP with a temperature for every image and every text, which learns by the loss's own gradient.

What iSogCLR's appendix C.3 tried and gave up: without the robust loss's rho nothing keeps a temperature from growing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from thermopile import Objective, Outcome, Settings


class PlainTemperatureSettings(Settings, frozen=True):
    """Settings of PlainTemperature."""

    tau_init: float = Field(default=0.01, gt=0)
    """Temperature before the first visit."""
    eta: float = Field(default=1e-3, gt=0)
    """Learning rate of Adam, whose averages are each temperature's own."""
    tau_min: float = 0.005
    """Lower bound; there is no upper one."""


class PlainTemperature(Objective):
    """Mean over pairs of both sides' cross-entropies, halved, each at its own temperature."""

    settings_of_mode: ClassVar = {"bimodal": PlainTemperatureSettings}
    settings: PlainTemperatureSettings

    def __init__(self, mode: str, settings: PlainTemperatureSettings) -> None:
        super().__init__(mode, settings, tau=settings.tau_init, m=0.0, v=0.0)

    def loss(
        self, first: Tensor, second: Tensor, own: slice, state: Mapping[str, Tensor], progress: object
    ) -> Outcome:  # fmt: skip
        """As Objective.loss: float32 [b, d] features, the state of this rank's samples."""
        rows = torch.arange(len(first), device=first.device)[own]
        taus = [state[f"{side}/tau"].detach().requires_grad_() for side in self.sides]
        losses = [F.cross_entropy(one[own] @ other.T / tau[:, None], rows, reduction="none") / 2
                  for one, other, tau in zip((first, second), (second, first), taus, strict=True)]  # fmt: skip
        gradients = torch.autograd.grad(torch.stack(losses).sum(), taus, retain_graph=True)
        new: dict[str, Tensor] = {}
        visit = state["visits"].to(first.dtype) + 1
        for side, tau, gradient in zip(self.sides, taus, gradients, strict=True):
            m = 0.9 * state[f"{side}/m"] + 0.1 * gradient
            v = 0.999 * state[f"{side}/v"] + 0.001 * gradient.square()
            step = m / (1 - 0.9**visit) / ((v / (1 - 0.999**visit)).sqrt() + 1e-8)
            stepped = (tau - self.settings.eta * step).clamp(min=self.settings.tau_min)
            new |= {f"{side}/tau": stepped.detach(), f"{side}/m": m, f"{side}/v": v}
        return Outcome(torch.stack(losses).sum(0).mean(), new, {"tau": torch.stack(taus).mean().detach()})
