"""What a loader hands to the trainer for one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch. Row i of every tensor belongs to sample_ids[i]."""

    sample_ids: Tensor
    """int64 [b], on the CPU: the dense ids of the samples, no id twice."""
    views: tuple[Tensor, ...]
    """float32 [b, 3, H, W] each, normalised: one view for image-text pairs, two for images alone."""
    tokens: Tensor | None = None
    """int32 [b, L], padded with the tokenizer's pad id; None where the dataset has no captions."""
