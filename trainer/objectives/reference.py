"""iSogCLR as the paper writes it: one line an equation, whole matrices, differentiated by torch. Read this first.

Nobody trains with it. `isogclr.py` computes the same in less memory and on several ranks;
`tests/trainer/objectives/test_reference.py` compares it with this file, and `benchmarks/objective.py` compares their
speed. Source: Z.-H. Qiu et al., ICML 2023, algorithm 1; all equation numbers are the paper's. Four points differ:

- eq 13, 14 and 19 to 21, the temperatures' gradients and the weights, have the new s, that of eq 12, 17 and 18, as in
  the authors' code; the paper writes the old one;
- a sample's first visit sets s to g, since no start of s is right for every sample;
- the temperature's gradient is clipped before it enters u, as in the code;
- the 1/n of eq 13 is part of eta.
"""

import math

import torch
from torch import Tensor

from .isogclr import IsogclrSettings

State = dict[str, Tensor]
"""Tensors [n], one row for each of the n samples: log_s, tau and u of each side, `image/…` and `text/…`, or of
`sample/…` if the two views of an image share a row."""


def isogclr_step(first: Tensor, second: Tensor, sample_ids: Tensor, state: State, settings: IsogclrSettings) -> Tensor:
    """Return the loss of a batch, whose gradient is the paper's, and update the rows of its samples in `state`.

    first, second: unit-norm features [b, d] of images and captions, or of two views; sample_ids: int64 [b], distinct.
    gamma and eta are constant, and eps is 0.
    """
    loss = torch.zeros((), device=first.device)
    positives = (first * second).sum(1, keepdim=True)
    for side, similarities, is_own in _anchors(first, second, bimodal="image/tau" in state):
        log_s, tau, u = (state[f"{side}/{field}"][sample_ids] for field in ("log_s", "tau", "u"))
        h = similarities - positives  # [anchors of a sample, b, candidates]
        exponents = (h.detach() / tau.unsqueeze(1)).masked_fill(is_own, -math.inf)
        negatives = int((~is_own[0]).sum())

        # eq 11, 15, 16: g, the batch's inner value. In logs, since exp(h / tau) may overflow a float.
        log_g = exponents.logsumexp((0, 2)) - math.log(len(h) * negatives)
        # eq 12, 17, 18: s, its moving average over the steps that saw the sample.
        log_keep = math.log1p(-settings.gamma) if settings.gamma < 1 else -math.inf
        mixed = torch.logaddexp(log_s + log_keep, log_g + math.log(settings.gamma))
        log_s = torch.where(log_s.isneginf(), log_g, mixed)  # -inf: never seen
        # eq 14, 21: the features' gradient is that of sum_j p_ij h_ij, the weights p held constant.
        p = (exponents - log_s.unsqueeze(1)).exp() / negatives
        pull_apart = (p * h).sum(2).mean(0)
        # eq 13, 19, 20: the gradient of a sample's own temperature.
        gradient = log_s + settings.rho - pull_apart.detach() / tau
        # eq 7: the robust loss; the last two terms add its gradient and no value.
        loss = loss + (tau * (log_s + settings.rho)).mean() + pull_apart.mean() - pull_apart.mean().detach()

        # Algorithm 1, steps 8 and 9: momentum, then a projected step of the temperature.
        u = (1 - settings.beta_u) * u + settings.beta_u * gradient.clamp(-settings.grad_clip, settings.grad_clip)
        tau = (tau - settings.eta * u).clamp(settings.tau_min, settings.tau_max)
        for field, values in (("log_s", log_s), ("tau", tau), ("u", u)):
            state[f"{side}/{field}"][sample_ids] = values
    return loss


def _anchors(first: Tensor, second: Tensor, *, bimodal: bool) -> list[tuple[str, Tensor, Tensor]]:
    """Return each side's name, similarities [anchors of a sample, b, candidates], and which candidates are the sample
    itself, bool [b, candidates]."""
    own = torch.eye(len(first), dtype=torch.bool, device=first.device)
    if bimodal:
        similarities = first @ second.T
        return [("image", similarities.unsqueeze(0), own), ("text", similarities.T.unsqueeze(0), own)]
    views = torch.cat([first, second])
    return [("sample", (views @ views.T).reshape(2, len(first), -1), torch.cat([own, own], dim=1))]
