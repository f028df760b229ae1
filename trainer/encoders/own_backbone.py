"""A user's own backbone, `module:name`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...pipeline.dataset.index import TokenizerInfo
from ..config import EncoderConfig
from ..errors import ConfigError
from ..plugins import installed, load_plugin
from .backbones import Backbone, OneBlock

TRIED = 2
"""Number of samples encoded as a check."""


class OwnBackbone(OneBlock):
    """A backbone from a user's module."""

    def __init__(self, key: str, body: nn.Module, width: int, recompute: bool, given: int | TokenizerInfo) -> None:
        """key: the setting that names the backbone, for messages. given: as in create_encoder."""
        super().__init__(body, width, recompute)
        self._key, self._given = key, given
        _try(key, body, width, given)
        self._groups = _groups_of(key, body)

    def check_side(self, pixels: int) -> None:
        _try(self._key, self.body, self.width, pixels)

    def refuse_unused_weights(self) -> None:
        """Raise ConfigError if features of two samples do not depend on some of the weights that are learned."""
        learned = {name: weight for name, weight in self.body.named_parameters() if weight.requires_grad}
        features = _encoded(self._key, self.body, _inputs(self._given, self.body))
        unused = [*learned]
        if learned and features.requires_grad:
            gradients = torch.autograd.grad(features.sum(), [*learned.values()], allow_unused=True)
            unused = [name for name, gradient in zip(learned, gradients, strict=True) if gradient is None]
        if unused:
            named = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more weights" if len(unused) > 5 else "")
            raise ConfigError(
                f"{self._key}: in evaluation mode, its features do not depend on {named}. Several GPUs would wait for "
                "their gradients: choose another model, or in a module of yours set their requires_grad to False"
            )

    def groups(self) -> list[nn.Module]:
        """Return the groups of layers from the body's method `groups`, or all layers as one group without it."""
        return [self.body] if self._groups is None else self._groups


def own_backbone(side: str, encoder: EncoderConfig, recompute: bool, given: int | TokenizerInfo) -> Backbone:
    """Import and create a backbone; arguments as in create_encoder.

    Raises ConfigError if it cannot be created, or does not map two samples to finite features of its width.
    """
    key = f"model.{side}.name = {encoder.name!r}"
    create = load_plugin(installed("encoders").get(encoder.name, encoder.name), key)
    sizes = {"image_size": given} if isinstance(given, int) else {"tokenizer": given}
    asked = ", ".join([*sizes, *encoder.config])
    try:
        body = create(**sizes, **encoder.config)
        width = body.width
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(
            f"{key} cannot be created with {asked}: {type(error).__name__}: {error}. "
            "It must return a torch module with the attribute width"
        ) from error
    if not (isinstance(body, nn.Module) and isinstance(width, int) and width > 0):
        raise ConfigError(
            f"{key} returns {type(body).__name__} with width {width!r}; it must return a torch module "
            "whose width is the number of its features"
        )
    return OwnBackbone(key, body, width, recompute, given)


@torch.no_grad()
def _try(key: str, body: nn.Module, width: int, given: int | TokenizerInfo) -> None:
    inputs = _inputs(given, body)
    features = _encoded(key, body, inputs)
    if not isinstance(features, Tensor) or features.shape != (TRIED, width):
        found = _described(features) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(f"{key} maps {_described(inputs)} to {found}; its width {width} needs [{TRIED}, {width}]")
    if not (features.is_meta or features.isfinite().all()):
        raise ConfigError(f"{key} maps {_described(inputs)} to features that are not finite; check its initial weights")


def _encoded(key: str, body: nn.Module, inputs: Tensor) -> Any:
    """Return the body's output for inputs in evaluation mode."""
    try:
        with evaluating(body):
            return body(inputs)
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"{key} fails on {_described(inputs)}: {type(error).__name__}: {error}") from error


def _inputs(given: int | TokenizerInfo, body: nn.Module) -> Tensor:
    if isinstance(given, int):
        inputs = torch.linspace(-1, 1, TRIED * 3 * given * given).view(TRIED, 3, given, given)
    else:
        inputs = torch.full((TRIED, given.context_length), given.end_id, dtype=torch.int32)
    return inputs.to(next(body.parameters(), inputs).device)


@contextmanager
def evaluating(body: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, where a pass changes nothing and draws no random numbers; then restore each mode."""
    training = [module for module in body.modules() if module.training]
    body.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _groups_of(key: str, body: nn.Module) -> list[nn.Module] | None:
    """Return the groups from its method `groups`; None without it. Raises ConfigError unless each weight is in one."""
    if not callable(groups := getattr(body, "groups", None)):
        return None
    try:
        listed = list(groups())
        grouped = [id(value) for group in listed for value in (*group.parameters(), *group.buffers())]
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(
            f"{key}: its groups() fails: {type(error).__name__}: {error}; it must return a list of modules, input first"
        ) from error
    if sorted(grouped) != sorted(id(value) for value in (*body.parameters(), *body.buffers())):
        raise ConfigError(f"{key}: its method groups must have each of its weights and buffers in one group")
    return listed


def _described(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
