"""iSogCLR on image-text pairs along the path that FastCLIP's published code takes, written anew.

Every process compares its anchors with all gathered candidates, images and texts each by a product of their own, and
differentiates the anchors; then it compares the same pairs once more, seen from the candidates, and differentiates
those. What is gathered carries no gradient. The exponents of an anchor are kept below its running maximum, its bound;
pairs are masked by an integer matrix that is made once. As there, a bound starts at 0, and an s below 1e-35 counts as
never seen: at the coldest temperatures the estimator differs from the one kept in logs.

Two things are not as published, so that the result is the papers': the gradients are not halved, and the factor tau of
a sample is not left out. The temperatures are those of before the step, and their update is iSogCLR's.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from thermopile.trainer.objectives.isogclr import IsogclrSettings
from thermopile.trainer.objectives.reference import State

_NEVER_SEEN_BELOW = 1e-35


class _Rows(NamedTuple):
    """State of one side, each [b, 1]; the estimator is s · exp(bound)."""

    s: Tensor
    bound: Tensor
    tau: Tensor
    u: Tensor


class _Compared(NamedTuple):
    mean: Tensor
    """[b, 1], mean over the candidates of exp(h / tau - bound)."""
    exps: Tensor
    """[b, b], 0 where a pair is none."""
    exponents: Tensor
    """[b, b], h / tau - bound."""


def fastclip_step(first: Tensor, second: Tensor, sample_ids: Tensor, state: State, settings: IsogclrSettings) -> Tensor:
    """Return the loss and update the state in place, as isogclr_step does. Source: FastCLIP section 4."""
    gathered_first, gathered_second = first.detach(), second.detach()
    mask = negatives_mask(len(first), first.device)
    of_first, of_second = first @ gathered_second.T, second @ gathered_first.T
    positives = (first * second).sum(1, keepdim=True)
    values, surrogates, sides = [], [], []
    for side, similarities in (("image", of_first), ("text", of_second)):
        before = _rows(state, side, sample_ids)
        compared, bound = _compare_and_raise_bound(similarities, positives, before, mask)
        after, weight, log_s_eps = _renew(before, bound, compared, settings)
        for field, column in (("log_s", after.s.log() + after.bound), ("tau", after.tau), ("u", after.u)):
            state[f"{side}/{field}"][sample_ids] = column.squeeze(1)
        values.append((before.tau * (log_s_eps + settings.rho)).mean())
        surrogates.append((weight * compared.mean).mean())
        sides.append((before.tau, bound, weight))
    positives = (gathered_first * gathered_second).sum(1, keepdim=True)
    for (tau, bound, weight), similarities in zip(sides, (of_second.T, of_first.T), strict=True):
        again = _compare((similarities - positives) * (1 / tau), bound, mask)
        surrogates.append((weight * again.mean).mean())
    surrogate = torch.stack(surrogates).sum()
    return torch.stack(values).sum() + surrogate - surrogate.detach()


@cache
def negatives_mask(batch: int, device: torch.device) -> Tensor:
    """int64 [b, b], 0 on the diagonal and 1 elsewhere; kept from one step to the next."""
    return 1 - torch.nn.functional.one_hot(torch.arange(batch, device=device), batch)


def _rows(state: State, side: str, sample_ids: Tensor) -> _Rows:
    log_s, tau, u = (state[f"{side}/{field}"][sample_ids].unsqueeze(1) for field in ("log_s", "tau", "u"))
    bound = log_s.clamp(min=0)  # a bound starts at 0 and never falls
    return _Rows((log_s - bound).exp(), bound, tau, u)


def _compare_and_raise_bound(
    similarities: Tensor, positives: Tensor, rows: _Rows, mask: Tensor
) -> tuple[_Compared, Tensor]:
    exponents = (similarities - positives) * (1 / rows.tau)
    bound = torch.maximum(rows.bound, exponents.max(1, keepdim=True).values.detach())
    return _compare(exponents, bound, mask), bound


def _compare(exponents: Tensor, bound: Tensor, mask: Tensor) -> _Compared:
    exponents = exponents - bound
    exps = exponents.exp() * mask
    return _Compared(exps.sum(1, keepdim=True) / (len(mask) - 1), exps, exponents)


def _renew(
    before: _Rows, bound: Tensor, compared: _Compared, settings: IsogclrSettings
) -> tuple[_Rows, Tensor, Tensor]:
    """The new rows; tau / (s + eps), the weight of an anchor's mean; and log(s + eps), free of the bound."""
    g = compared.mean.detach()
    kept = (1 - settings.gamma) * before.s * (before.bound - bound).exp()
    s = torch.where(before.s < _NEVER_SEEN_BELOW, g, kept + settings.gamma * g)
    s_eps = s + settings.eps * (-bound).exp()
    log_s_eps = s_eps.log() + bound
    mean_exponent = (compared.exps * (compared.exponents + bound)).sum(1, keepdim=True) / (len(g) - 1) / s_eps
    gradient = (log_s_eps + settings.rho - mean_exponent.detach()).clamp(-settings.grad_clip, settings.grad_clip)
    u = (1 - settings.beta_u) * before.u + settings.beta_u * gradient
    tau = (before.tau - settings.eta * u).clamp(settings.tau_min, settings.tau_max)
    return _Rows(s, bound, tau, u), before.tau / s_eps, log_s_eps
