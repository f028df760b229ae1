"""Activation checkpointing: recompute activations inside blocks during backprop, to save memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def run_blocks(blocks: Iterable[nn.Module], inputs: Tensor, *, recompute: bool) -> Tensor:
    """Apply the blocks in order; with `recompute` only the tensors between them are kept. The result is the same.

    inputs: any tensor that the first block accepts; each block accepts the previous one's output.
    """
    for block in blocks:
        inputs = _recomputed(block, inputs) if recompute else block(inputs)
    return inputs


def _recomputed(block: nn.Module, inputs: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # A compiled graph updates statistics in its forward part only, and cannot use contexts.
        compiled: Tensor = checkpoint(block, inputs, use_reentrant=False)
        return compiled
    outputs: Tensor = checkpoint(
        block, inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), _statistics_untouched(block))
    )
    return outputs


@contextmanager
def _statistics_untouched(block: nn.Module) -> Iterator[None]:
    """Make batch norms update copies of their statistics: recomputation would count each batch twice."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    own = [(norm, dict(norm.named_buffers(recurse=False))) for norm in norms]
    for norm, buffers in own:
        for name, buffer in buffers.items():
            setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, buffers in own:
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)
