"""Anchors against their candidates, each anchor at its own temperature: the b·b part of every contrastive objective.

The exponent of anchor i and candidate j is h_ij / tau_i with h_ij = S_ij - positive_i. Only differences to the anchor's
largest similarity are exponentiated, so nothing overflows at any temperature, and a side costs one exponential a pair.
"""

from typing import NamedTuple

import torch
from torch import Tensor

EXCLUDED = -1e30
"""Similarity to write where a column is no candidate of the row. Finite, where -inf would make exp(x)·x a NaN; over any
temperature below 1e28 its exponential is 0."""

CPU_CHUNK = 2**18
"""Pairs compared at a time on a CPU: 1 MiB of float32, which stays in the cache from the difference to the sums."""


class Contrast(NamedTuple):
    """What n anchors see of their candidates; q is the softmax of an anchor's exponents over its candidates."""

    exps: Tensor
    """exp(h_ij / tau_i - max_j), in the layout of the similarities; 0 where excluded. The softmax is exps / total."""
    total: Tensor
    """[n], sum of an anchor's exps."""
    log_sum: Tensor
    """[n], log of the sum over candidates of exp(h_ij / tau_i)."""
    mean_exponent: Tensor
    """[n], sum over candidates of q_ij · h_ij / tau_i."""


def contrast(similarities: Tensor, positives: Tensor, tau: Tensor, dim: int, out: Tensor) -> Contrast:
    """Compare anchors with their candidates, which lie along `dim` of `similarities` (1: anchors are rows, 0: columns).

    similarities: [rows, columns], EXCLUDED where there is no candidate. positives, tau: [n], for each anchor the
    similarity of its positive pair and its temperature. All of one dtype, float32 or float64, as are the results.
    out: like similarities, or similarities itself, which is then lost; it becomes the result's exps.
    """
    peak = similarities.amax(dim)
    chunk = max(1, CPU_CHUNK // similarities.shape[1]) if similarities.device.type == "cpu" else len(similarities)
    totals, spreads = [], []
    per_pair = (vector.unsqueeze(dim).expand_as(similarities) for vector in (peak, tau))
    chunks = (torch.split(pairs, chunk) for pairs in (similarities, out, *per_pair))
    for rows, out_rows, peak_rows, tau_rows in zip(*chunks, strict=True):
        exponents = (rows - peak_rows).div_(tau_rows)
        torch.exp(exponents, out=out_rows)
        totals.append(out_rows.sum(dim))
        spreads.append(exponents.mul_(out_rows).sum(dim))
    # Anchors in rows are whole in one chunk; those in columns have a part in every chunk.
    total, spread = (torch.cat(parts) if dim == 1 else torch.stack(parts).sum(0) for parts in (totals, spreads))
    lift = (peak - positives) / tau
    return Contrast(out, total, total.log() + lift, spread / total + lift)


def bimodal_gradients(
    first: Tensor, second: Tensor, sides: tuple[Contrast, Contrast], pulls: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients in `first` and `second` [b, d] of sum_i pull_i · sum_j q_ij h_ij over both sides, q held constant.

    sides: anchors in `first` (rows of S = first @ secondᵀ), anchors in `second` (columns). pulls: [b] each.
    Overwrites sides[0].exps, which becomes dR/dS. Source: iSogCLR eq 21; FastCLIP eq 6-7.
    """
    (rows, columns), (row_pull, column_pull) = sides, pulls
    weights = rows.exps.mul_((row_pull / rows.total).unsqueeze(1))
    weights.addcmul_(columns.exps, (column_pull / columns.total).unsqueeze(0))
    # h_ij holds -S_ii for every candidate j, and q_i sums to 1.
    weights.diagonal().sub_(row_pull + column_pull)
    return weights @ second, weights.T @ first


def unimodal_gradients(views: Tensor, anchors: Contrast, pull: Tensor) -> Tensor:
    """Gradient in `views` [2b, d] (first views above second views) of sum_a pull_a · sum_z q_az h_az, q held constant.

    anchors: of the rows of S = views @ viewsᵀ. pull: [2b]. Overwrites anchors.exps. Source: iSogCLR eq 14.
    """
    samples = len(views) // 2
    weights = anchors.exps.mul_((pull / anchors.total).unsqueeze(1))
    weights.diagonal(samples).sub_(pull[:samples])
    weights.diagonal(-samples).sub_(pull[samples:])
    # A view stands on both sides of S. One sum of b·b costs less than a second product.
    return torch.matmul(weights + weights.T, views)
