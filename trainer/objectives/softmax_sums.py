"""Softmax sums of anchors over their candidates, with one temperature per anchor.

The exponent of anchor i and candidate j is h_ij / tau_i with h_ij = S_ij - S_ii. Exponents are taken relative to the
anchor's largest similarity, so nothing overflows at any temperature. Powers are of 2: on a CPU torch computes exp2 five
times as fast as exp, and dividing by tau · ln 2 costs no more than dividing by tau. The positive is never among the
candidates here; an objective that includes it adds its exponent, which is 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .pairs import EXCLUDED, Block, Pairs

LN2 = math.log(2)


class Sums(NamedTuple):
    """Running sums over the candidates processed so far, in exponents x_ij = (S_ij - peak_i) / tau_i; each [n]."""

    peak: Tensor
    """Largest similarity."""
    total: Tensor
    """Sum of exp(x)."""
    spread: Tensor
    """Sum of x·exp(x)."""


class Weights(NamedTuple):
    """dR/dS_ij = scale_i · 2^((S_ij - peak_i) / tau_ln2_i), summed over the pair's anchors, one or two.

    Each has an entry for every row of the pairs' `anchors`.
    """

    peak: Tensor
    tau_ln2: Tensor
    """tau_i · ln 2: the increase in similarity that doubles the exponential."""
    scale: Tensor


def accumulate(pairs: Pairs, tau: Tensor) -> Sums:
    """Return the sums over candidates of this rank's anchors; tau and results are [anchor_sets, n], float32 or 64."""
    # Allocate before the pieces: small results between freed temporaries would fragment the heap, by gigabytes.
    sums = Sums(torch.full_like(tau, EXCLUDED), torch.zeros_like(tau), torch.zeros_like(tau))
    tau_ln2 = tau * LN2
    for half, block in enumerate(pairs.blocks):
        for rows, similarities in pairs.pieces(block):
            local = block.local(rows)
            _add(sums, (half, local), similarities, tau_ln2[half, local], dim=1)
            if pairs.mirrored:
                _add(sums, (1, slice(None)), similarities, tau_ln2[1], dim=0)
    sums.spread.mul_(LN2)
    return sums


def grad_weights(similarities: Tensor, rows: slice, block: Block, weights: Weights) -> None:
    """Overwrite a piece of similarities with dR/dS; both rows and columns are anchors."""
    of_columns = _scaled_exponentials(similarities, Weights(*(vector[block.columns] for vector in weights)))
    row_weights(similarities, rows, weights)
    similarities.add_(of_columns)


def row_weights(similarities: Tensor, rows: slice, weights: Weights) -> None:
    """Overwrite a piece of similarities with dR/dS; only rows are anchors."""
    of_rows = Weights(*(vector[rows].unsqueeze(1) for vector in weights))
    similarities.sub_(of_rows.peak).div_(of_rows.tau_ln2).exp2_().mul_(of_rows.scale)


def _scaled_exponentials(similarities: Tensor, weights: Weights) -> Tensor:
    return (similarities - weights.peak).div_(weights.tau_ln2).exp2_().mul_(weights.scale)


def _add(sums: Sums, anchors: tuple[int, slice], similarities: Tensor, tau_ln2: Tensor, dim: int) -> None:
    """Add the candidates along `dim` of a piece to the sums of `anchors`, in place; the spread is in powers of 2."""
    peak, total, spread = (values[anchors] for values in sums)
    new_peak = torch.maximum(peak, similarities.amax(dim))
    exponents = (similarities - new_peak.unsqueeze(dim)).div_(tau_ln2.unsqueeze(dim))
    exps = exponents.exp2()
    # Rescale the old sums to the new peak, which is at least as high.
    lower = (peak - new_peak).div_(tau_ln2)
    share = lower.exp2()
    spread.addcmul_(lower, total).mul_(share).add_(exponents.mul_(exps).sum(dim))
    total.mul_(share).add_(exps.sum(dim))
    peak.copy_(new_peak)
