"""Retrieval of images by caption and captions by image."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .chunks import chunks


@torch.inference_mode()
def ranks(
    queries: Tensor, gallery: Tensor, wanted: Tensor, holds: Tensor, on_progress: Callable[[int, int], None]
) -> Tensor:
    """Count wrong gallery entries ranked before each query's first right one, int64 [q]; 0 is a hit at 1.

    queries, gallery: float32 [q, d] and [g, d], rows of norm 1. Entry j is right for query i if holds[j] == wanted[i],
    int64 [g] and [q]; every query has a right entry. Ties count as wrong entries ranked before, so constant features
    find nothing.
    """
    found = []
    for chunk in chunks(len(queries), len(gallery)):
        similarity = queries[chunk] @ gallery.T
        right = wanted[chunk, None] == holds
        best = similarity.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        found.append(((similarity >= best) & ~right).sum(1))
        on_progress(chunk.stop, len(queries))
    return torch.cat(found)
