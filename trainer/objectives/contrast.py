"""Anchors against their candidates, each anchor at its own temperature: the softmax part of a contrastive objective.

The exponent of anchor i and candidate j is h_ij / tau_i with h_ij = S_ij - S_ii. Only differences to the anchor's
largest similarity are exponentiated, so nothing overflows at any temperature. The positive is never among the
candidates here: an objective that counts it as one adds its exponent, which is 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .pairs import Block, Pairs


class Sums(NamedTuple):
    """What anchors have seen of their candidates so far, in exponents x_ij = (S_ij - peak_i) / tau_i; each [n]."""

    peak: Tensor
    """Largest similarity."""
    total: Tensor
    """Sum of exp(x)."""
    spread: Tensor
    """Sum of x·exp(x)."""


class Weights(NamedTuple):
    """dR/dS_ij = scale_i · exp((S_ij - peak_i) / tau_i), summed over the pair's two anchors; each [2b]."""

    peak: Tensor
    tau: Tensor
    scale: Tensor


def look(pairs: Pairs, tau: Tensor) -> Sums:
    """What this rank's anchors see of their candidates; tau and the results are [2, n], float32 or float64."""
    sides: list[Sums] = []
    for half, block in enumerate(pairs.blocks):
        seen: list[Sums] = []
        from_columns: Sums | None = None
        for rows, similarities in pairs.pieces(block):
            local = slice(rows.start - block.rows.start, rows.stop - block.rows.start)
            seen.append(_sums(similarities, tau[half, local], dim=1))
            if pairs.mirrored:
                more = _sums(similarities, tau[1], dim=0)
                from_columns = more if from_columns is None else _merge(from_columns, more, tau[1])
        sides.append(Sums(*(torch.cat(parts) for parts in zip(*seen, strict=True))))
        if from_columns is not None:
            sides.append(from_columns)
    return Sums(*(torch.stack(parts) for parts in zip(*sides, strict=True)))


def weigh(similarities: Tensor, rows: slice, block: Block, weights: Weights) -> None:
    """Write dR/dS over a piece of similarities; rows and columns are anchors alike."""
    of_columns = _scaled_exponentials(similarities, Weights(*(vector[block.columns] for vector in weights)))
    of_rows = Weights(*(vector[rows].unsqueeze(1) for vector in weights))
    similarities.sub_(of_rows.peak).div_(of_rows.tau).exp_().mul_(of_rows.scale).add_(of_columns)


def _scaled_exponentials(similarities: Tensor, weights: Weights) -> Tensor:
    return (similarities - weights.peak).div_(weights.tau).exp_().mul_(weights.scale)


def _sums(similarities: Tensor, tau: Tensor, dim: int) -> Sums:
    """Of anchors whose candidates lie along `dim`."""
    peak = similarities.amax(dim, keepdim=True)
    exponents = (similarities - peak).div_(tau.unsqueeze(dim))
    exps = exponents.exp()
    return Sums(peak.squeeze(dim), exps.sum(dim), exponents.mul_(exps).sum(dim))


def _merge(one: Sums, other: Sums, tau: Tensor) -> Sums:
    """The sums over the candidates of both."""
    peak = torch.maximum(one.peak, other.peak)
    total, spread = torch.zeros_like(peak), torch.zeros_like(peak)
    for part in (one, other):
        lower = (part.peak - peak) / tau
        share = lower.exp()
        total += share * part.total
        spread += share * (part.spread + lower * part.total)
    return Sums(peak, total, spread)
