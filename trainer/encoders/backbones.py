"""Backbones: images or tokens → features. Their base class, the small built-in ones, and activation checkpointing.

And bounds on what a model's configuration may ask for, checked before anything takes memory.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError
from ..uncompiled import uncompiled
from .synced_batch_norm import SyncedBatchNorm

MAX_SETTING, MAX_MODULES, MAX_WEIGHTS = 1 << 24, 30_000, 10**11
"""Upper bounds on a setting, on a model's modules (48 layers of 128 experts have 25,000), and on its weights."""


class Backbone(nn.Module):
    """Images or tokens → features h, [b, width]: the part of an encoder that is kept after training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def check_side(self, pixels: int) -> None:
        """Raise ConfigError if local views of this side in pixels do not fit."""

    def projection(self, dim: int) -> nn.Module | None:
        """Return the trained head that came with the backbone, if it leads to `dim` dimensions."""
        return None

    def groups(self) -> list[nn.Module]:
        """Return the layers in groups that may be locked or learn at their own rates, input first.

        Each layer with weights or buffers is in one group, and a group depends on no later group.
        """
        return [self]


class OneBlock(Backbone):
    """A backbone that activation checkpointing recomputes as a whole."""

    def __init__(self, body: nn.Module, width: int, recompute: bool) -> None:
        super().__init__(width)
        self.body = body
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Tensor:
        """float32 [b, 3, H, W], or int [b, L], → [b, width]."""
        features: Tensor = _recomputed(self.body, self.body, inputs) if self.recompute else self.body(inputs)
        return features


class BuiltIn(OneBlock):
    """A small backbone."""

    body: nn.Sequential

    def groups(self) -> list[nn.Module]:
        """Return each convolution, embedding or linear layer with the layers up to the next."""
        starts = [i for i, layer in enumerate(self.body) if isinstance(layer, nn.Conv2d | MeanOfTokens | nn.Linear)]
        return [self.body[first:end] for first, end in pairwise([*starts, len(self.body)])]


def conv(recompute: bool, width: int = 32, batch_norm: bool = False) -> BuiltIn:
    """Three strided convolutions, for small images of about 32 pixels."""
    if not isinstance(batch_norm, bool):
        raise TypeError(f"batch_norm = {batch_norm!r}; use true or false")
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((3, width, 2 * width, 4 * width)):
        layers.append(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=not batch_norm))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()] if batch_norm else [nn.ReLU()]
    return BuiltIn(nn.Sequential(*layers, PooledTo4(4), nn.Flatten()), 4 * width * 16, recompute)


class PooledTo4(nn.AdaptiveAvgPool2d):
    """Averages to 4 × 4; skips maps of that size, as from 32 pixels, for which torch would take a while."""

    def forward(self, maps: Tensor) -> Tensor:
        """[b, c, H, W] → [b, c, 4, 4]."""
        height, width = maps.shape[-2:]
        if torch.are_deterministic_algorithms_enabled() and not (height % 4 or width % 4):
            # The same mean; the adaptive one has no deterministic backward pass on a GPU.
            return F.avg_pool2d(maps, (height // 4, width // 4))
        return maps if (height, width) == (4, 4) else super().forward(maps)


def mean_embedding(recompute: bool, vocab_size: int, end_id: int, width: int = 128) -> BuiltIn:
    """The mean of the token embeddings and one hidden layer; ignores word order."""
    body = nn.Sequential(MeanOfTokens(vocab_size, end_id, width), nn.Linear(width, 2 * width), nn.ReLU())
    return BuiltIn(body, 2 * width, recompute)


class MeanOfTokens(nn.Module):
    """The mean of a caption's token embeddings."""

    def __init__(self, vocab_size: int, end_id: int, width: int) -> None:
        super().__init__()
        self.end_id = end_id
        self.embedding = nn.Embedding(vocab_size, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int [b, L] → [b, width]."""
        real = caption_mask(tokens, self.end_id).unsqueeze(-1)
        mean: Tensor = (self.embedding(tokens) * real).sum(1) / real.sum(1).clamp(min=1)
        return mean


def caption_mask(tokens: Tensor, end_id: int) -> Tensor:
    """Return which tokens belong to a caption, bool [b, L]: those up to its first end token. The rest is padding.

    tokens: int [b, L]. Not derived from a pad id, because CLIP's tokenizer, for one, pads with the end token.
    """
    is_end = tokens == end_id
    return (is_end.cumsum(1) - is_end.long()) == 0


def recompute_alone(block: nn.Module) -> None:
    """Make a block recompute its activations, whatever calls it."""
    block.forward = partial(_recomputed, block, block.forward)


def _recomputed(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Call `forward`, the block or its method."""
    if torch.compiler.is_compiling() and not any(isinstance(each, SyncedBatchNorm) for each in block.modules()):
        # A compiled graph updates statistics in its forward part only, and cannot use contexts.
        return checkpoint(forward, *inputs, use_reentrant=False, **named)
    return _recomputed_eagerly(block, forward, *inputs, **named)


# Norms over all ranks are not compiled, so blocks with such norms are not either: tracing would lose the context.
@uncompiled
def _recomputed_eagerly(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), statistics_untouched(block)

    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)


@contextmanager
def statistics_untouched(block: nn.Module) -> Iterator[None]:
    """Make batch norms update copies of their statistics: a second forward pass would count each batch twice."""
    with ExitStack() as end:
        for norm in (module for module in block.modules() if isinstance(module, _BatchNorm)):
            for name, buffer in [*norm.named_buffers(recurse=False)]:
                end.callback(setattr, norm, name, buffer)
                setattr(norm, name, buffer.clone())
        yield


def refuse_absurd(where: str, settings: object) -> None:
    """Raise ConfigError for a whole number that no model has; lists of so many layers alone would fill the memory."""
    if isinstance(settings, dict | list):
        for value in settings.values() if isinstance(settings, dict) else settings:
            refuse_absurd(where, value)
    elif isinstance(settings, int) and abs(settings) > MAX_SETTING:
        raise ConfigError(f"{where}: no model has a setting of {settings:,}; it would not fit into memory")


def refuse_too_large(make: Callable[[], nn.Module]) -> None:
    """Make a model without memory. Raises ValueError if it has more modules or weights than any model."""
    made = count(1)

    def counted(*_: object) -> None:
        if next(made) > MAX_MODULES:
            raise ValueError(f"it has more than {MAX_MODULES:,} parts; look at its settings of sizes")

    with register_module_module_registration_hook(counted), torch.device("meta"):
        weights = sum(weight.numel() for weight in make().parameters())
    if weights > MAX_WEIGHTS:
        raise ValueError(f"{weights:.1e} weights do not fit into memory; look at the settings of the model")
