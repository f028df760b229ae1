"""What is measured: a step of the objective, the products that it cannot do without, and two rivals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ....trainer.objectives import Objective, Progress, create_objective
from .autograd import autograd_step
from .fastclip_path import fastclip_step

OURS, PRODUCTS, AUTOGRAD, FASTCLIP = "ours", "products", "autograd", "fastclip"

RIVALS: dict[str, Callable[[Tensor, Tensor, Mapping[str, Tensor], Any], tuple[Tensor, dict[str, Tensor]]]] = {
    AUTOGRAD: autograd_step,
    FASTCLIP: fastclip_step,
}
"""(first, second, state, settings of isogclr) -> (loss, new state)."""

MATRICES = {OURS: 0, PRODUCTS: 1, AUTOGRAD: 7, FASTCLIP: 16}
"""Similarity matrices of float32 that a contender holds at its peak, about; 0 where it does not grow with the batch."""


@dataclass(frozen=True)
class Case:
    """One size at which contenders are compared."""

    name: str
    mode: str
    batch: int
    dim: int
    device: str

    @property
    def rows(self) -> int:
        """Rows and columns of the similarities."""
        return self.batch if self.mode == "bimodal" else 2 * self.batch

    @property
    def contenders(self) -> tuple[str, ...]:
        """The rivals are written for one objective."""
        rivals = tuple(RIVALS) if (self.name, self.mode) == ("isogclr", "bimodal") else ()
        return (OURS, PRODUCTS, *rivals)

    def needed_bytes(self, contender: str) -> int:
        """Memory that a contender takes at its peak, about, beside some that does not grow with the batch's square."""
        return MATRICES[contender] * 4 * self.rows**2


def create_contender(contender: str, case: Case) -> Callable[[], None]:
    """A call that does one step: forward, backward into the features, new state.

    Features are float32 [b, d], random and unit-norm; the samples of the batch have been seen before.
    """
    first, second = _features(case)
    if contender == PRODUCTS:
        return partial(_three_products, first, second, case.mode)
    objective = create_objective(case.name, case.mode).to(case.device)
    state = _state_of_seen_samples(objective, case)

    def step() -> None:
        first.grad = second.grad = None
        if contender == OURS:
            loss = objective(first, second, state, Progress(step=0, steps_per_epoch=1)).loss
        else:
            loss, _ = RIVALS[contender](first, second, state, objective.settings)
        loss.backward()

    return step


def _features(case: Case) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    drawn = (torch.randn(case.batch, case.dim, generator=random) for _ in range(2))
    first, second = (normalize(features).to(case.device).requires_grad_() for features in drawn)
    return first, second


def _three_products(first: Tensor, second: Tensor, mode: str) -> None:
    """S and its product with either side, each into a fresh matrix: the least that forward and backward take."""
    with torch.no_grad():
        if mode == "unimodal":
            first = second = torch.cat([first, second])
        similarities = first @ second.T
        similarities @ second
        similarities.T @ first


def _state_of_seen_samples(objective: Objective, case: Case) -> dict[str, Tensor]:
    """A log-domain field begins at -inf, which says never seen; 0 stands for a value of 1."""
    start = {path: 0.0 if math.isinf(value) else value for path, value in objective.fields.items()}
    rows = {path: torch.full((case.batch,), value, device=case.device) for path, value in start.items()}
    return {**rows, "visits": torch.ones(case.batch, dtype=torch.int64, device=case.device)}
