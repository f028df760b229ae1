"""Activation checkpointing: what blocks hold inside is not kept for backprop but computed again, to save memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def run_blocks(blocks: Iterable[nn.Module], inputs: Tensor, *, recompute: bool) -> Tensor:
    """The blocks one after the other; with `recompute` only what passes between them is kept, and the result the same.

    inputs: any tensor that the first block takes; each block takes what the one before it gives.
    """
    for block in blocks:
        inputs = _recomputed(block, inputs) if recompute else block(inputs)
    return inputs


def _recomputed(block: nn.Module, inputs: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # A compiled graph writes statistics in its forward part alone, and cannot have contexts.
        compiled: Tensor = checkpoint(block, inputs, use_reentrant=False)
        return compiled
    outputs: Tensor = checkpoint(
        block, inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), _statistics_untouched(block))
    )
    return outputs


@contextmanager
def _statistics_untouched(block: nn.Module) -> Iterator[None]:
    """Batch norms record their statistics on copies: the second time would count every batch twice."""
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
