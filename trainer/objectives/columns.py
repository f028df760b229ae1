"""Columns of the global batch's features, for losses that compare a view's d columns instead of its b rows."""

from collections.abc import Iterator

import torch
from torch import Tensor


def centred(features: Tensor) -> Tensor:
    """Return features [2, b, d] minus the mean of each view's columns."""
    # Twice: the mean of a column far from 0 is itself rounded, and the second pass removes the rest of it.
    for _ in range(2):
        features = features - features.mean(1, keepdim=True)
    return features


def off_diagonal_products(left: Tensor, right: Tensor, budget: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield leftᵀ · right, [d, d] with 0 on its diagonal, in chunks of rows within `budget` bytes.

    left, right: [b, d]. A chunk, [rows, d], belongs to the columns of `left` in its slice; it is valid until the next.
    """
    width = left.shape[1]
    height = min(width, max(1, budget // (width * left.element_size())))
    buffer = left.new_empty((height, width))
    for start in range(0, width, height):
        columns = slice(start, min(start + height, width))
        products = torch.mm(left[:, columns].T, right, out=buffer[: columns.stop - start])
        products.diagonal(start).fill_(0.0)
        yield columns, products
