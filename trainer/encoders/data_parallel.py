"""Encoders prepared for training: memory format, compilation and, with several ranks, averaged gradients."""

# No `from __future__ import annotations`: torch inspects the annotations of `_average` as objects.
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ..config import TrainConfig
from ..errors import ConfigError
from ..metrics.step_clock import StepClock
from ..precision import keep_compiled_code_at_home
from ..world import World
from . import Encoders
from .own_backbone import OwnBackbone
from .synced_batch_norm import synchronise_batch_norms


def encoders_of_a_step(
    encoders: Encoders, config: TrainConfig, device: torch.device, world: World, clock: StepClock
) -> nn.Module:
    """Return a module to call in place of `encoders`, with the same parameters. Call it before creating the optimiser.

    With several ranks it averages the gradients (torch's DDP), and `clock` is notified as each bucket is ready. Batch
    norms then use statistics of all ranks on GPUs; on CPUs, where torch cannot, of each rank's own samples.
    Raises ConfigError for settings that would fail on a GPU in the first steps.
    """
    if config.channels_last is True:
        # Kernels only: a convolution converts its input to its kernel's memory format.
        encoders.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    on_gpu = device.type == "cuda"
    if world.size > 1 and on_gpu:
        refuse_unused_weights(encoders)
        synchronise_batch_norms(encoders)
    if config.compile:
        keep_compiled_code_at_home()
        if on_gpu:
            refuse_compiler()
            # torch 2.11's compiler says so of a softmax whose reduction it splits; nothing is wrong.
            warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled", category=UserWarning)
        # Compile each encoder separately and in place, so that checkpoints keep the names of their weights.
        for encoder in encoders.children():
            encoder.compile()
    if world.size == 1:
        return encoders
    parallel = DistributedDataParallel(
        encoders,
        device_ids=[device.index] if on_gpu else None,
        gradient_as_bucket_view=True,
        # Otherwise DDP rebuilds its buckets after the first step. A gradient's bucket decides the order in which three
        # or more ranks are summed, so a resumed run would not be bit-identical to an uninterrupted run, as it must be
        # on CPUs and with deterministic algorithms.
        find_unused_parameters=not on_gpu or config.deterministic,
    )
    if on_gpu:  # the batch norms keep their statistics equal on GPUs; on CPUs rank 0's count
        parallel.broadcast_buffers = False
    parallel.register_comm_hook(clock, _average)
    return parallel


def refuse_unused_weights(encoders: nn.Module) -> None:
    """Raise ConfigError if a user's encoder has weights without a gradient: on GPUs, DDP waits for all gradients."""
    for module in encoders.modules():
        if isinstance(module, OwnBackbone):
            module.refuse_unused_weights()


def refuse_compiler() -> None:
    """Raise ConfigError if torch's compiler cannot compile for a GPU while `fp32_precision` is set."""
    from torch._inductor import config as inductor

    if inductor.max_autotune or inductor.max_autotune_gemm:
        names = "TORCHINDUCTOR_MAX_AUTOTUNE and TORCHINDUCTOR_MAX_AUTOTUNE_GEMM"
        raise ConfigError(f"compile: torch's autotuning asks for TF32 by its old name and raises; unset {names}")


def batch_norm_advice(encoders: nn.Module, device: torch.device, world: World, pieces: int) -> list[str]:
    """Warn about the encoders' batch norms with several ranks on CPUs, and with several pieces per batch.

    Empty without batch norms.
    """
    if not any(isinstance(module, _BatchNorm) and module.training for module in encoders.modules()):
        return []
    advice = []
    if pieces > 1:
        advice.append(
            f"with micro_batch the encoders' batch norms use the statistics of a piece, 1/{pieces} of the "
            "batch, so the results depend on it"
        )
    if world.size > 1 and device.type != "cuda":
        advice.append(
            "on CPUs the encoders' batch norms use only the samples of their own rank, so the results depend "
            "on the number of ranks; on GPUs they use all"
        )
    return advice


def _average(clock: StepClock, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    clock.bucket_ready()
    group: Any = None  # the default group
    return allreduce_hook(group, bucket)
