"""Bounds on what a model's configuration may ask for, checked before anything takes memory."""

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..errors import ConfigError

MAX_SETTING, MAX_MODULES, MAX_WEIGHTS = 1 << 24, 30_000, 10**11
"""Upper bounds on a setting, on a model's modules (48 layers of 128 experts have 25,000), and on its weights, of which
no single GPU holds as many."""


def refuse_absurd(where: str, settings: object) -> None:
    """Raise ConfigError for a whole number that no model has; lists of so many layers alone would fill the memory."""
    if isinstance(settings, dict | list):
        for value in settings.values() if isinstance(settings, dict) else settings:
            refuse_absurd(where, value)
    elif isinstance(settings, int) and abs(settings) > MAX_SETTING:
        raise ConfigError(f"{where}: no model has a setting of {settings:,}; it would not fit into memory")


def refuse_too_large(make: Callable[[], nn.Module]) -> None:
    """Make a model without memory. Raises ValueError if it has more modules or weights than any model."""
    made = itertools.count(1)

    def counted(*_: object) -> None:
        if next(made) > MAX_MODULES:
            raise ValueError(f"it has more than {MAX_MODULES:,} parts; look at its settings of sizes")

    hook = register_module_module_registration_hook(counted)
    try:
        with torch.device("meta"):
            weights = sum(weight.numel() for weight in make().parameters())
    finally:
        hook.remove()
    if weights > MAX_WEIGHTS:
        raise ValueError(f"{weights:.1e} weights do not fit into memory; look at the settings of the model")
