"""A batch: one rank's input to one training step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch. Row i of every tensor belongs to sample_ids[i]."""

    sample_ids: Tensor
    """int64 [b], on the CPU: dense sample ids, without repeats."""
    views: tuple[Tensor, ...]
    """float32 [b, 3, H, W] each, normalised: one view for image-text pairs, two for images only."""
    tokens: Tensor | None = None
    """int32 [b, L], padded with the tokenizer's pad id; None if the dataset has no captions."""
    local: tuple[Tensor, ...] = ()
    """float32 [b, 3, h, h] each, normalised: m local views, smaller crops of the same pictures."""

    def to(self, device: torch.device) -> Batch:
        """Return the batch with all views and tokens on `device`; the ids stay on the CPU."""
        return replace(
            self,
            views=tuple(view.to(device, non_blocking=True) for view in self.views),
            tokens=None if self.tokens is None else self.tokens.to(device, non_blocking=True),
            local=tuple(view.to(device, non_blocking=True) for view in self.local),
        )
