"""The optimiser and its learning rate, a pure function of the step, so that a resumed run goes on exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from .config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Rises linearly to config.lr over warmup_steps, then falls as a cosine to 0 at total_steps. step counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    share = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.lr * 0.5 * (1 + math.cos(math.pi * share))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def create_optimizer(config: OptimizerConfig, encoders: nn.Module, objective: nn.Module) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices and kernels alone, not on biases, norms or the objective's own parameters."""
    parameters = list(encoders.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        {"params": list(objective.parameters()), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(_without_empty(groups), lr=config.lr, betas=config.betas, eps=config.eps)


def _without_empty(groups: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    return [group for group in groups if group["params"]]
