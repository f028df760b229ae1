"""Gather and sum values of all ranks, the only exchanges of objectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class GlobalBatch:
    """The ranks that share a global batch: rank k holds the rows that follow those of rank k - 1."""

    rank: int
    world: int
    communicating: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager around every exchange, for timing."""
    shares: tuple[int, ...] | None = None
    """Rows of each rank; None: all have as many."""

    @classmethod
    def of_this_process(cls, communicating: Callable[[], AbstractContextManager[None]] = nullcontext) -> GlobalBatch:
        """Return the ranks of torch.distributed's default group, or a single rank without a group."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1)
        return cls(dist.get_rank(), dist.get_world_size(), communicating)

    def own(self, rows: int) -> slice:
        """Return the slice of this rank's `rows` rows in the global batch."""
        first = self.rank * rows if self.shares is None else sum(self.shares[: self.rank])
        return slice(first, first + rows)

    def gather(self, values: Tensor) -> Tensor:
        """Gather [k, n, …] of this rank into [k, b, …], in rank order; no gradient passes."""
        if self.world == 1:
            return values
        sent = values.detach()
        if self.shares is not None:  # a collective takes as many rows of every rank
            sent = pad(sent, [0, 0] * (sent.dim() - 2) + [0, max(self.shares) - sent.shape[1]])
        # As bytes: gloo does not support every dtype.
        sent = sent.contiguous().view(torch.uint8)
        received = sent.new_empty((self.world, *sent.shape))
        with self.communicating():
            dist.all_gather(list(received), sent)
        of_ranks = received.view(values.dtype)
        if self.shares is None:
            return of_ranks.transpose(0, 1).flatten(1, 2)
        return torch.cat([of_rank[:, :rows] for of_rank, rows in zip(of_ranks, self.shares, strict=True)], 1)

    def sum(self, values: Tensor) -> Tensor:
        """Replace `values`, of one shape on all ranks, by their sum over ranks, and return it; no gradient passes."""
        if self.world > 1:
            with self.communicating():
                dist.all_reduce(values)
        return values

    def check_alike(self, features: Tensor) -> None:
        """Raise ValueError unless the ranks' features have their shares' rows, one width and one dtype.

        Synchronises with the device, so call it only in the first step of a run.
        """
        own = torch.tensor([*features.shape, features.element_size()], device=features.device)
        of_ranks = replace(self, shares=None).gather(own.unsqueeze(1)).T.tolist()
        shares = self.shares or [of_ranks[0][0]] * self.world
        if any(of_rank != [rows, *of_ranks[0][1:]] for of_rank, rows in zip(of_ranks, shares, strict=True)):
            held = ", ".join(f"{rows} × {width} numbers of {size} bytes" for rows, width, size in of_ranks)
            raise ValueError(
                f"features: the ranks hold {held}; all must hold the same: "
                "choose a global batch that the number of ranks divides, and one precision"
            )
