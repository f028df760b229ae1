"""iSogCLR on image-text pairs as one would write it from its equations: whole matrices, differentiated by torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ....trainer.objectives.isogclr import IsogclrSettings

STATE_SIDES = ("image", "text")


def autograd_step(
    first: Tensor, second: Tensor, state: Mapping[str, Tensor], settings: IsogclrSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and new state; features [b, d], state as the objective's. Source: iSogCLR eq 12, 13, 15-21.

    The settings' schedules are not followed: gamma and eta are constant.
    """
    similarities = first @ second.T
    positives = similarities.diagonal().unsqueeze(1)
    own = torch.eye(len(first), dtype=torch.bool, device=first.device)
    losses, new = [], {"visits": state["visits"] + 1}
    for side, candidates in zip(STATE_SIDES, (similarities, similarities.T), strict=True):
        log_s, tau, u = (state[f"{side}/{field}"] for field in ("log_s", "tau", "u"))
        differences = candidates - positives
        exponents = (differences.detach() / tau.unsqueeze(1)).masked_fill(own, -math.inf)
        log_count = math.log(len(first) - 1)
        log_s = average(log_s, exponents.logsumexp(1) - log_count, settings.gamma)
        log_s_eps = torch.logaddexp(log_s, torch.full_like(log_s, settings.eps).log())
        weights = (exponents - (log_s_eps + log_count).unsqueeze(1)).exp()
        surrogate = (weights * differences).sum(1)
        gradient = log_s_eps + settings.rho - surrogate.detach() / tau
        losses.append(value_with_gradient((tau * (log_s_eps + settings.rho)).mean(), surrogate.mean()))
        new[f"{side}/log_s"] = log_s
        new[f"{side}/tau"], new[f"{side}/u"] = step_tau(tau, u, gradient, settings)
    return losses[0] + losses[1], new


def average(log_s: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """log of (1 - gamma) s + gamma g, and log g where s was never seen."""
    kept = log_s + (math.log1p(-gamma) if gamma < 1 else -math.inf)
    return torch.where(torch.isneginf(log_s), log_g, torch.logaddexp(kept, log_g + math.log(gamma)))


def step_tau(tau: Tensor, u: Tensor, gradient: Tensor, settings: IsogclrSettings) -> tuple[Tensor, Tensor]:
    """The new tau and u. Source: iSogCLR algorithm 1."""
    clipped = gradient.clamp(-settings.grad_clip, settings.grad_clip)
    u = (1 - settings.beta_u) * u + settings.beta_u * clipped
    return (tau - settings.eta * u).clamp(settings.tau_min, settings.tau_max), u


def value_with_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    """A scalar equal to `value` that differentiates like `surrogate`."""
    return value + (surrogate - surrogate.detach())
