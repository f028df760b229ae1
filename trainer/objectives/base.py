"""What every objective has in common: its settings' rules, its inputs, its outcome."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from .gathering import Ranks


class FeaturesError(ValueError):
    """Features are not unit-norm rows; rows that are not finite count as such."""


@dataclass(frozen=True)
class Progress:
    """How far training has come; every schedule of an objective is a pure function of it."""

    step: int
    """Steps already made: 0 in the first step of a run."""
    steps_per_epoch: int
    """Steps of one pass over the data, at least 1."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.steps_per_epoch < 1:
            raise ValueError(
                f"Progress(step={self.step}, steps_per_epoch={self.steps_per_epoch}): "
                "step counts from 0 and steps_per_epoch from 1"
            )

    @property
    def epoch(self) -> int:
        """Whole epochs already made."""
        return self.step // self.steps_per_epoch


@dataclass(frozen=True)
class Outcome:
    """What one step of an objective gives back."""

    loss: Tensor
    """Scalar, float32 or wider; its `backward()` reaches the features and the objective's own parameters."""
    state: dict[str, Tensor]
    """The batch's new rows, each [b] in the dtype it came in: the fields of the objective, and `visits` plus one."""
    metrics: dict[str, Tensor]
    """Scalars on the features' device, by name; reading one waits for the device."""


class Settings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of every objective's settings: frozen, no unknown keys, no NaN or infinity."""

    similarity_budget: int = Field(default=2**28, ge=1)
    """Bytes for similarities, 1 or more. What does not fit is computed twice, in chunks that do; changes no result
    beyond round-off. The default, 256 MiB, holds 8,192 pairs in float32."""


@dataclass(frozen=True)
class TemperatureRate:
    """How fast an objective's global temperature is to learn, by an AdamW of its own without weight decay."""

    lr: float
    """Learning rate, 0 or more."""
    betas: tuple[float, float]
    """AdamW's."""
    slow_below: float | None
    """A third of the learning rate holds once the temperature is below this; None: never."""


class Objective(nn.Module):
    """A loss over two batches of features that reads and renews the state of the batch's samples.

    `objective(first, second, state, progress)` takes unit-norm features [b, d] of the same b distinct samples in the
    same order (bimodal: image and text; unimodal: two views), and the state of those samples, each tensor [b].
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]]
    """Settings by mode; its keys are the modes that the objective knows."""

    settings: Settings
    """The settings in force, defaults filled in."""

    fields: dict[str, float]
    """Schema of the per-sample state: path of a field -> the value that a sample never seen has."""

    temperature_rate: TemperatureRate | None = None
    """Set where the objective learns a global temperature, its parameter `tau`."""

    communicating: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Around every exchange with other ranks; the trainer measures it with this."""

    _looked_at_features = False

    def check(self, first: Tensor, second: Tensor, ranks: Ranks) -> None:
        """Raise ValueError unless both are unit-norm [b, d] of one shape, on every rank, 2 samples or more in all.

        On a GPU the values are looked at in the first step alone: a look waits for the device.
        """
        check_shapes(first, second)
        first_step = not self._looked_at_features
        if first_step:
            ranks.check_alike(first)
        if len(first) * ranks.world < 2:
            raise ValueError(f"features: a batch of {len(first)} sample has no negatives; use a batch of at least 2")
        if first_step or first.device.type == "cpu":
            check_unit_norm("first", first)
            check_unit_norm("second", second)
        self._looked_at_features = True

    def project(self) -> None:
        """Bring the objective's own parameters back into their range, in place; every step begins with it."""

    def advice(self, batch_size: int) -> list[str]:
        """What a person should know before a run with global batches of this size; nothing where all is well."""
        return []

    def forward(self, first: Tensor, second: Tensor, state: Mapping[str, Tensor], progress: Progress) -> Outcome:
        """Value, gradients and new state of one step. Raises ValueError for shapes or state that do not fit."""
        raise NotImplementedError


def check_shapes(first: Tensor, second: Tensor) -> None:
    """Raise ValueError unless both are floating [b, d] of one shape."""
    if first.dim() != 2 or first.shape != second.shape:
        raise ValueError(
            f"features: first is {list(first.shape)} and second {list(second.shape)}; "
            "both must be [b, d], row i of each from the same sample"
        )
    if not (first.is_floating_point() and second.is_floating_point()):
        raise ValueError(f"features: first is {first.dtype} and second {second.dtype}; both must be floating point")


def check_unit_norm(name: str, features: Tensor) -> None:
    """Raise FeaturesError unless every row of `features` [b, d] has norm 1, within the round-off of its dtype.

    Reads values back, and so waits for the device.
    """
    norms = torch.linalg.vector_norm(features.detach(), dim=1, dtype=torch.promote_types(features.dtype, torch.float32))
    slack = 1e-3 if features.dtype in (torch.float32, torch.float64) else 1e-2
    off = ~((norms - 1).abs() <= slack)  # so written, a norm of NaN is off
    if off.any():
        row = int(off.nonzero()[0])
        raise FeaturesError(
            f"features: row {row} of {name} has norm {norms[row].item():.6g}, and so {int(off.sum())} of {len(norms)} "
            "rows are not of norm 1; pass finite features through torch.nn.functional.normalize(…, dim=1)"
        )


def check_state(state: Mapping[str, Tensor], fields: Mapping[str, float], batch_size: int) -> None:
    """Raise ValueError unless `state` holds every field and, if there are any, `visits`; each [batch_size]."""
    for name in (*fields, *(["visits"] if fields else [])):
        if name not in state:
            raise ValueError(f"state: '{name}' is missing; given {sorted(state)}")
        if state[name].shape != (batch_size,):
            raise ValueError(
                f"state: '{name}' is {list(state[name].shape)} but the batch has {batch_size} samples; "
                f"pass [{batch_size}], in the order of the features' rows"
            )


def count_visit(visits: Tensor) -> Tensor:
    """`visits` plus one, [b] in its own dtype; by way of int64, for torch does not add in uint32."""
    return (visits.to(torch.int64) + 1).to(visits.dtype)


def working_dtype(first: Tensor, second: Tensor) -> torch.dtype:
    """The dtype to compute in: that of the wider features, and at least float32."""
    return torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
