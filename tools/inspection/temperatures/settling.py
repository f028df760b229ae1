"""The temperatures at which the update rule comes to rest while features stay as they are."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

VISITS = 200
_FIRST, _HALVED_AFTER, _LARGEST = 0.3, 20, 0.1
"""Step of log tau by a gradient of 1 in the first visit, visits after which it has halved, and the largest step, since
after a larger one s is another temperature's. The rule's own eta would take many epochs, to the same place."""
_MOST_NEGATIVES = 1024


class Rule(NamedTuple):
    """Parameters of the update rule (iSogCLR eq 11 to 13)."""

    rho: float
    gamma: float
    grad_clip: float
    negatives: int
    """In a batch."""
    lowest: float
    highest: float


def at_rest(h: NDArray[np.float32], tau: NDArray[np.float32], rule: Rule, seed: int = 0) -> NDArray[np.float64]:
    """Return where m temperatures come to rest, float64 [m].

    h: float32 [m, k], similarities of k negatives minus that of the positive. tau: float32 [m], to begin with.
    """
    random, rows = np.random.default_rng(seed), np.arange(len(h))[:, None]
    log_tau, log_s = np.log(tau.astype(np.float64)), np.zeros(len(h))
    total, counted = np.zeros(len(h)), 0
    for visit in range(VISITS):
        drawn = random.integers(0, h.shape[1], (1, min(rule.negatives, _MOST_NEGATIVES)))
        exponent = h[rows, drawn] / np.exp(log_tau)[:, None]
        highest = exponent.max(1)
        weights = np.exp(exponent - highest[:, None])
        log_g = np.log(weights.mean(1)) + highest
        keep = math.log1p(-rule.gamma) if rule.gamma < 1 else -math.inf
        log_s = np.logaddexp(keep + log_s, math.log(rule.gamma) + log_g) if visit else log_g
        mean_exponent = np.exp(log_g - log_s) * (weights * exponent).sum(1) / weights.sum(1)
        gradient = (log_s + rule.rho - mean_exponent).clip(-rule.grad_clip, rule.grad_clip)
        step = (_FIRST / (1 + visit / _HALVED_AFTER) * gradient).clip(-_LARGEST, _LARGEST)
        log_tau = (log_tau - step).clip(np.log(rule.lowest), np.log(rule.highest))
        if visit >= VISITS // 2:
            total, counted = total + log_tau, counted + 1
    return np.exp(total / counted)
