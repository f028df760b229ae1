"""Finding a picture by its caption, or a caption by its picture."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .chunks import chunks


@torch.inference_mode()
def ranks(
    queries: Tensor, gallery: Tensor, wanted: Tensor, holds: Tensor, on_progress: Callable[[int, int], None]
) -> Tensor:
    """How many wrong entries of the gallery stand before a query's first right one: int64 [q], 0 is found at once.

    queries, gallery: float32 [q, d] and [g, d], rows of norm 1. Entry j is right for query i where holds[j] ==
    wanted[i]; int64 [g] and [q], and every query has a right entry. A wrong entry just as similar stands before the
    right one, so that features that are all the same find nothing.
    """
    found = []
    for chunk in chunks(len(queries), len(gallery)):
        similarity = queries[chunk] @ gallery.T
        right = wanted[chunk, None] == holds
        best = similarity.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        found.append(((similarity >= best) & ~right).sum(1))
        on_progress(chunk.stop, len(queries))
    return torch.cat(found)
