"""Gather and sum values of all ranks, the only exchanges of objectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class GlobalBatch:
    """The ranks that share a global batch: rank k holds rows k·n … (k + 1)·n - 1 of it."""

    rank: int
    world: int
    communicating: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager around every exchange, for timing."""

    @classmethod
    def of_this_process(cls, communicating: Callable[[], AbstractContextManager[None]] = nullcontext) -> GlobalBatch:
        """Return the ranks of torch.distributed's default group, or a single rank without a group."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1)
        return cls(dist.get_rank(), dist.get_world_size(), communicating)

    def own(self, rows: int) -> slice:
        """Return the slice of this rank's `rows` rows in the global batch."""
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def gather(self, values: Tensor) -> Tensor:
        """Gather [k, n, …] of this rank into [k, world·n, …], in rank order; no gradient passes."""
        if self.world == 1:
            return values
        # As bytes: gloo does not support every dtype.
        sent = values.detach().contiguous().view(torch.uint8)
        received = sent.new_empty((self.world, *sent.shape))
        with self.communicating():
            dist.all_gather(list(received), sent)
        return received.view(values.dtype).transpose(0, 1).flatten(1, 2)

    def sum(self, values: Tensor) -> Tensor:
        """Replace `values`, of one shape on all ranks, by their sum over ranks, and return it; no gradient passes."""
        if self.world > 1:
            with self.communicating():
                dist.all_reduce(values)
        return values

    def check_alike(self, features: Tensor) -> None:
        """Raise ValueError if the ranks' features differ in shape or dtype, which gathering does not check.

        Synchronises with the device, so call it only in the first step of a run.
        """
        own = torch.tensor([*features.shape, features.element_size()], device=features.device)
        of_ranks = self.gather(own.unsqueeze(1)).T.tolist()
        if any(of_rank != of_ranks[0] for of_rank in of_ranks):
            held = ", ".join(f"{rows} × {width} numbers of {size} bytes" for rows, width, size in of_ranks)
            raise ValueError(
                f"features: the ranks hold {held}; all must hold the same: "
                "choose a global batch that the number of ranks divides, and one precision"
            )
