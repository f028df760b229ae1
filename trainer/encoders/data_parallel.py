"""The encoders as a step calls them: laid out, compiled, and on more ranks with their gradients averaged."""

# Annotations stay objects here, without `from __future__ import annotations`: torch compares those of `_average`.
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ..config import TrainConfig
from ..step_clock import StepClock
from ..world import World
from . import Encoders


def encoders_of_a_step(
    encoders: Encoders, config: TrainConfig, device: torch.device, world: World, clock: StepClock
) -> nn.Module:
    """A module to call in place of `encoders`, whose parameters it shares; call it before the optimiser is made.

    On more ranks it averages the gradients (torch's DDP), and clock is told when the last of them sets out. Batch norms
    then take their statistics of all ranks on GPUs; on CPUs, where torch has no such norm, of each rank's own samples.
    """
    if config.channels_last:
        # Of the kernels alone: a convolution brings its input into the layout of its kernel.
        encoders.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if world.size > 1 and device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(encoders)  # type: ignore[no-untyped-call]
    if config.compile:
        # Each encoder by itself, and in place: checkpoints keep the names of their weights.
        for encoder in encoders.children():
            encoder.compile()
    if world.size == 1:
        return encoders
    on_gpu = device.type == "cuda"
    parallel = DistributedDataParallel(
        encoders,
        device_ids=[device.index] if on_gpu else None,
        gradient_as_bucket_view=True,
        # Or it lays its buckets out anew after the first step, and a gradient's place there decides the order in which
        # three ranks or more are summed: a resumed run would not have the bits of one never stopped, as CPUs promise.
        find_unused_parameters=not on_gpu,
    )
    parallel.register_comm_hook(clock, _average)
    return parallel


def batch_norm_advice(encoders: nn.Module, device: torch.device, world: World) -> list[str]:
    """What to know of the encoders' batch norms on more ranks; nothing where they have none, or are on GPUs."""
    has_some = any(isinstance(module, _BatchNorm) for module in encoders.modules())
    if world.size == 1 or device.type == "cuda" or not has_some:
        return []
    return ["on CPUs the encoders' batch norms see the samples of their own rank alone, so the results depend on the "
            "number of ranks; on GPUs they see all"]  # fmt: skip


def _average(clock: StepClock, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    clock.bucket_ready()
    group: Any = None  # the default one
    return allreduce_hook(group, bucket)
