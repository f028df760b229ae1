"""Batch norms with the statistics of all ranks, which never read from the device.

torch's SyncBatchNorm allows ranks without samples. It drops them by a boolean index, and so waits for the device in
every norm of every step. Here every rank has some.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..uncompiled import uncompiled


def synchronise_batch_norms(module: nn.Module) -> None:
    """Make a module's batch norms on a GPU use the samples of all ranks; they keep their names and weights.

    Every rank must pass some samples.
    """
    if "timm" in sys.modules:  # it has norms followed by an activation, which torch's conversion would drop
        from timm.layers import convert_sync_batchnorm

        convert_sync_batchnorm(module)
    else:
        nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    for norm in module.modules():
        if isinstance(norm, nn.SyncBatchNorm):  # no conversion has a parameter for the class
            kind, name = type(norm), SyncedBatchNorm.__name__
            norm.__class__ = SyncedBatchNorm if kind is nn.SyncBatchNorm else type(name, (kind, SyncedBatchNorm), {})


class SyncedBatchNorm(nn.SyncBatchNorm):
    """A batch norm over the samples of all ranks; in evaluation mode an ordinary batch norm."""

    # A graph cannot hold the exchange between ranks.
    @uncompiled
    def forward(self, inputs: Tensor) -> Tensor:
        """[b, C, …] → the same shape."""
        if not self.training:
            return super().forward(inputs)
        assert self.num_batches_tracked is not None  # torch's default
        self.num_batches_tracked.add_(1)
        normalised: Tensor = _Normalised.apply(  # type: ignore[no-untyped-call]
            inputs, self.weight, self.bias, self.running_mean, self.running_var, self.momentum, self.eps
        )
        return normalised


class _Normalised(torch.autograd.Function):
    """torch's own kernels, in the order of torch.nn.modules._functions.SyncBatchNorm."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        inputs = _packed(inputs)
        means, inverse_deviations = torch.batch_norm_stats(inputs, eps)
        # The samples, not the values, of which float32 might not hold the number.
        own = torch.cat([means, inverse_deviations, means.new_full((1,), len(inputs))])
        # A sum with zeros gathers the ranks' rows on every backend.
        of_all = own.new_zeros(dist.get_world_size(), len(own))
        of_all[dist.get_rank()] = own
        dist.all_reduce(of_all)
        means, inverse_deviations = of_all[:, :-1].chunk(2, dim=1)
        samples, values = of_all[:, -1], inputs[0, 0].numel()
        mean, inverse_deviation = torch.batch_norm_gather_stats_with_counts(
            inputs, means, inverse_deviations, running_mean, running_var, momentum, eps, samples * values
        )
        counts = samples.to(torch.int32) * values
        ctx.save_for_backward(inputs, weight, mean, inverse_deviation, counts)
        return torch.batch_norm_elemt(inputs, weight, bias, mean, inverse_deviation, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _packed(gradient)
        inputs, weight, mean, inverse_deviation, counts = ctx.saved_tensors
        sum_dy, sum_dy_xmu, of_weight, of_bias = torch.batch_norm_backward_reduce(
            gradient, inputs, mean, inverse_deviation, weight, *ctx.needs_input_grad[:3]
        )
        of_inputs = None
        if ctx.needs_input_grad[0]:  # not if the inputs are pixels; then there are no sums
            of_all = torch.cat([sum_dy, sum_dy_xmu])
            dist.all_reduce(of_all)
            sum_dy, sum_dy_xmu = of_all.chunk(2)
            of_inputs = torch.batch_norm_backward_elemt(
                gradient, inputs, mean, inverse_deviation, weight, sum_dy, sum_dy_xmu, counts
            )
        # Without weights torch's kernel gives empty tensors.
        of_weights = (None, None) if weight is None else (of_weight, of_bias)
        return of_inputs, *of_weights, None, None, None, None


def _packed(values: Tensor) -> Tensor:
    """Return the values in one of the two memory formats that the kernels know."""
    return values if values.is_contiguous(memory_format=torch.channels_last) else values.contiguous()
