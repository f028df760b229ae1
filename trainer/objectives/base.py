"""The interface of an objective: settings, inputs, outcome."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from .gathering import GlobalBatch


class FeaturesError(ValueError):
    """Features are not unit-norm rows; NaN and infinity count as such."""


@dataclass(frozen=True)
class Progress:
    """How far training has come. Every schedule of an objective is a pure function of it."""

    step: int
    """Completed steps: 0 during the first step of a run."""
    steps_per_epoch: int
    """Steps per pass over the data, at least 1."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.steps_per_epoch < 1:
            raise ValueError(
                f"Progress(step={self.step}, steps_per_epoch={self.steps_per_epoch}): "
                "step counts from 0 and steps_per_epoch from 1"
            )

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self.step // self.steps_per_epoch


@dataclass(frozen=True)
class Outcome:
    """The result of one step of an objective."""

    loss: Tensor
    """Scalar, float32 or wider. Its `backward()` reaches the features and the objective's own parameters."""
    state: dict[str, Tensor]
    """New rows of the batch, each [b] in its input dtype: the objective's fields, and `visits` plus one."""
    metrics: dict[str, Tensor]
    """Scalars on the features' device, by name; reading one synchronises with the device."""


class Settings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base class of all objectives' settings: frozen, no unknown keys, no NaN or infinity."""

    similarity_budget: int = Field(default=2**28, ge=1)
    """Memory for similarities in bytes, 1 or more. What does not fit is computed twice, in chunks; results differ by
    round-off only. The default, 256 MiB, holds 8,192 pairs in float32."""


@dataclass(frozen=True)
class TemperatureRate:
    """How an objective's global temperature learns: by its own AdamW without weight decay."""

    lr: float
    """Learning rate, 0 or more."""
    betas: tuple[float, float]
    """AdamW's betas."""
    slow_below: float | None
    """The learning rate is divided by 3 while the temperature is below this; None: never."""


class Objective(nn.Module):
    """A loss on two batches of features that reads and updates the state of the batch's samples.

    `objective(first, second, state, progress)` takes unit-norm features [b, d] of the same b distinct samples in the
    same order (bimodal: image and text; unimodal: two views), and the state of those samples, each tensor [b].
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]]
    """Settings model for each supported mode."""

    settings: Settings
    """The settings in use, with defaults filled in."""

    fields: dict[str, float]
    """Schema of the per-sample state: path of a field -> initial value for unseen samples."""

    temperature_rate: TemperatureRate | None = None
    """Set if the objective learns a global temperature, its parameter `tau`."""

    communicating: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Context manager around every exchange with other ranks; the trainer uses it for timing."""

    _looked_at_features = False

    def check(self, first: Tensor, second: Tensor, global_batch: GlobalBatch) -> None:
        """Raise ValueError unless both are unit-norm [b, d] of equal shape, on all ranks, of 2 samples or more in all.

        On a GPU values are checked only in the first step, because reading them synchronises with the device.
        """
        check_shapes(first, second)
        first_step = not self._looked_at_features
        if first_step:
            global_batch.check_alike(first)
        if len(first) * global_batch.world < 2:
            raise ValueError(f"features: a batch of {len(first)} sample has no negatives; use a batch of at least 2")
        if first_step or first.device.type == "cpu":
            check_unit_norm("first", first)
            check_unit_norm("second", second)
        self._looked_at_features = True

    def project(self) -> None:
        """Clamp the objective's own parameters to their range, in place. Every step starts with this."""

    def advice(self, batch_size: int) -> list[str]:
        """Return warnings for a run with global batches of this size; empty if there are none."""
        return []

    def forward(self, first: Tensor, second: Tensor, state: Mapping[str, Tensor], progress: Progress) -> Outcome:
        """Return loss, gradients and new state of one step. Raises ValueError for shapes or state that do not fit."""
        raise NotImplementedError


def check_shapes(first: Tensor, second: Tensor) -> None:
    """Raise ValueError unless both are floating-point [b, d] of equal shape."""
    if first.dim() != 2 or first.shape != second.shape:
        raise ValueError(
            f"features: first is {list(first.shape)} and second {list(second.shape)}; "
            "both must be [b, d], row i of each from the same sample"
        )
    if not (first.is_floating_point() and second.is_floating_point()):
        raise ValueError(f"features: first is {first.dtype} and second {second.dtype}; both must be floating point")


def check_unit_norm(name: str, features: Tensor) -> None:
    """Raise FeaturesError unless every row of `features` [b, d] has norm 1, within the round-off of its dtype.

    Synchronises with the device.
    """
    norms = torch.linalg.vector_norm(features.detach(), dim=1, dtype=torch.promote_types(features.dtype, torch.float32))
    slack = 1e-3 if features.dtype in (torch.float32, torch.float64) else 1e-2
    off = ~((norms - 1).abs() <= slack)  # negated, so that a NaN norm counts as off
    if off.any():
        row = int(off.nonzero()[0])
        raise FeaturesError(
            f"features: row {row} of {name} has norm {norms[row].item():.6g}, and so {int(off.sum())} of {len(norms)} "
            "rows are not of norm 1; pass finite features through torch.nn.functional.normalize(…, dim=1)"
        )


def check_state(state: Mapping[str, Tensor], fields: Mapping[str, float], batch_size: int) -> None:
    """Raise ValueError unless `state` holds every field, each [batch_size], and `visits` if there are any fields."""
    for name in (*fields, *(["visits"] if fields else [])):
        if name not in state:
            raise ValueError(f"state: '{name}' is missing; given {sorted(state)}")
        if state[name].shape != (batch_size,):
            raise ValueError(
                f"state: '{name}' is {list(state[name].shape)} but the batch has {batch_size} samples; "
                f"pass [{batch_size}], in the order of the features' rows"
            )


def count_visit(visits: Tensor) -> Tensor:
    """Return `visits` plus one, [b] in its own dtype; through int64, because torch cannot add in uint32."""
    return (visits.to(torch.int64) + 1).to(visits.dtype)


def working_dtype(first: Tensor, second: Tensor) -> torch.dtype:
    """Return the dtype to compute in: that of the wider features, at least float32."""
    return torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
