"""Gather and sum values of all ranks, the only exchanges of objectives, and the features of a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
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
    def of_this_process(cls, communicating: Callable[[], AbstractContextManager[None]] = nullcontext) -> Self:
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

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over ranks of values of one shape on all ranks; no gradient passes."""
        return self.sum(values.clone(memory_format=torch.contiguous_format)) / self.world

    def check_alike(self, features: Tensor) -> None:
        """Raise ValueError unless the ranks' features have their shares' rows, one width and one dtype.

        Synchronises with the device, so call it only in the first step of a run.
        """
        own = torch.tensor([*features.shape, features.element_size()], device=features.device)
        of_ranks = replace(self, shares=None).gather(own.unsqueeze(1)).T.tolist()
        shares = self.shares or [of_ranks[0][0]] * self.world
        if any(of_rank != [rows, *of_ranks[0][1:]] for of_rank, rows in zip(of_ranks, shares, strict=True)):
            shapes = ", ".join(f"{rows} × {width} numbers of {size} bytes" for rows, width, size in of_ranks)
            raise ValueError(
                f"features: the ranks hold {shapes}; all must hold the same: "
                "choose a global batch that the number of ranks divides, and one precision"
            )


@dataclass(frozen=True)
class Frame:
    """The features of a step: this rank's, and those of the global batch that they are compared with."""

    views: Tensor
    """[v, n, d], of this rank: first, second and local views, differentiable."""
    targets: Tensor
    """[2, b, d], of the global batch: the first two views, or the momentum encoder's keys; without a graph."""
    has_keys: bool
    ranks: GlobalBatch

    @classmethod
    def of(cls, views: Tensor, keys: Tensor | None, ranks: GlobalBatch) -> Self:
        """Gather the targets, the first of a step's exchanges; in the features' dtype, at least float32, from here on.

        views: [v, n, d]; keys: [2, n, d], constants.
        """
        sent = views[:2].detach() if keys is None else keys
        dtype = torch.promote_types(torch.promote_types(views.dtype, sent.dtype), torch.float32)
        wide = views.to(dtype)
        is_gathered = keys is None and ranks.world == 1
        targets = wide[:2].detach() if is_gathered else ranks.gather(sent).to(dtype)
        return cls(wide, targets, keys is not None, ranks)

    @property
    def own(self) -> slice:
        """This rank's rows of the targets."""
        return self.ranks.own(self.views.shape[1])

    def features(self, *, summed: bool = False) -> Tensor:
        """Return the targets, differentiable unless they are keys.

        The gradient of this rank's features is then its own, times the ranks, because DDP averages over them: right if
        all ranks compute the same loss from them. summed: it is the sum of the gradients that all ranks computed.
        """
        if self.has_keys:
            return self.targets
        if self.ranks.world == 1:
            return self.views if len(self.views) == 2 else self.views[:2]
        linked: Tensor = _Targets.apply(self.views[:2], self.targets, self, summed)  # type: ignore[no-untyped-call]
        return linked


class _Targets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, views: Tensor, targets: Tensor, frame: Frame, summed: bool) -> Tensor:
        ctx.ranks, ctx.own, ctx.summed = frame.ranks, frame.own, summed
        return targets.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.summed:
            return ctx.ranks.sum(gradients.clone())[:, ctx.own], None, None, None
        return gradients[:, ctx.own] * ctx.ranks.world, None, None, None
