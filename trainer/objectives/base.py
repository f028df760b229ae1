"""The interface of an objective: settings, inputs, outcome; and the step shared by all objectives."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import cos, pi
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from .closed_form import attach_gradients, full_precision
from .directed import Directed
from .gathering import GlobalBatch
from .pairs import Pairs

WEIGHT = "weight"
"""State key of each sample's loss factor, [b], 0 or more; absent if all samples count the same."""


class FeaturesError(ValueError):
    """Features do not suit the objective, which takes unit-norm rows, or finite rows; NaN and infinity are neither."""


@dataclass(frozen=True)
class Progress:
    """Progress of training. Every schedule of an objective is a pure function of it."""

    step: int
    """Completed steps: 0 during the first step of a run."""
    steps_per_epoch: int
    """Steps per pass over the data, at least 1."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.steps_per_epoch < 1:
            raise ValueError(f"{self}: step counts from 0 and steps_per_epoch from 1")

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self.step // self.steps_per_epoch

    def cosine(self, start: float, end: float, epochs: int) -> float:
        """Return half a cosine from `start` in epoch 0 to `end` in epoch `epochs`, and `end` afterwards.

        Constant within an epoch. Source: FastCLIP section 5, for gamma from 1 to gamma_min.
        """
        return end if self.epoch >= epochs else end + 0.5 * (1.0 + cos(pi * self.epoch / epochs)) * (start - end)


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

    similarity_budget: int = Field(default=0, ge=0)
    """Memory for similarities in bytes; 0 is 256 MiB on a CPU and 4 GiB on a GPU, for 8,192 and 32,768 pairs in
    float32. Larger similarities are computed twice, in chunks; results differ by round-off only."""

    def budget_on(self, device: torch.device) -> int:
        """Return `similarity_budget`, or the device's default."""
        return self.similarity_budget or (2**32 if device.type == "cuda" else 2**28)


@dataclass(frozen=True)
class TemperatureRate:
    """Learning rule of an objective's own parameters if they are a temperature's: AdamW without weight decay."""

    lr: float
    """Learning rate, 0 or more."""
    betas: tuple[float, float]
    """AdamW's betas."""
    slow_below: float | None = None
    """Divide the learning rate by 3 while the only parameter, a temperature, is below this; None: never."""
    decay: float = 1.0
    """Factor of the learning rate from one epoch to the next."""


@dataclass
class Computed:
    """An objective's results from the similarities of the global batch.

    With keys or local views, value and gradients are means over directions (see `Directed`).
    """

    value: Tensor
    """Scalar: the reported loss."""
    feature_gradients: Callable[[], Tensor]
    """Returns the gradients of this rank's features, [2, n, d], or with local views [2 + m, n, d], times the number of
    ranks: DDP averages over ranks."""
    parameter_gradients: list[Tensor] = field(default_factory=list)
    """Gradients in the order of `parameters()`."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """New rows of this rank's samples, without `visits`."""
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Objective(nn.Module):
    """A loss on two batches of features that reads and updates the state of the batch's samples.

    `objective(first, second, state, progress)` takes features [b, d] of the same b distinct samples in the same order
    (bimodal: image and text; unimodal: two views), unit-norm if `unit_norm` is set, and these samples' state, each
    tensor [b]. `weight` in the state multiplies a sample's terms of the loss, but not its new rows.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]]
    """Settings model for each supported mode."""

    keys: ClassVar[Literal["never", "optional", "always"]] = "never"
    """Whether a step takes the keys of a momentum encoder; never in mode bimodal."""

    has_local: ClassVar[bool] = False
    """Whether a step takes local views."""

    takes_weights: ClassVar[bool] = False
    """Whether the loss is a mean of terms of single anchors, which may be weighted: `state` may have WEIGHT."""

    settings: Settings
    """The settings in use, with defaults filled in."""

    fields: dict[str, float]
    """Schema of the per-sample state: path of a field -> initial value for unseen samples."""

    temperature_rate: TemperatureRate | None = None
    """Set if the objective's own parameters are a global temperature, or a network that predicts temperatures."""

    predicts: ClassVar[bool] = False
    """Whether `predict` gives temperatures of samples without state."""

    unit_norm: bool = True
    """Whether features must be normalised; False: they are used as they are, finite and of any norm."""

    pairs_of: type[Pairs] = Pairs
    """Defines similarity: the product of two features, or a subclass's."""

    communicating: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Context manager around every exchange with other ranks; the trainer uses it for timing."""

    shares: tuple[int, ...] | None = None
    """Samples of each rank in the next step, if they may differ: `Run` sets it before each step of a run with holes."""

    _looked_at_features = False

    def __init__(self, mode: str, settings: Settings, **initial: float) -> None:
        """initial: per-sample state fields with their initial values for unseen samples."""
        super().__init__()
        self.settings = settings
        self.sides = ("image", "text") if mode == "bimodal" else ("sample",)
        self.across = mode == "bimodal"  # whether similarities within a side are excluded
        self.row_fields = tuple(initial)
        self.fields = {f"{side}/{name}": value for side in self.sides for name, value in initial.items()}

    def project(self) -> None:
        """Clamp the objective's own parameters to their range, in place. Every step starts with this."""

    def advice(self, batch_size: int, *, keys: bool = False) -> list[str]:
        """Return warnings for a run with global batches of this size, with or without a momentum encoder's keys."""
        return []

    def predict(self, side: str, features: Tensor) -> Tensor:
        """Return the temperatures of any samples, [m], from one side's features, [m, d], as a step takes them."""
        raise NotImplementedError(f"{self._name} predicts no temperatures")

    def check_frame(self, keys: bool, local: int) -> None:
        """Raise ValueError unless the objective supports these keys and local views.

        keys: whether each step has the keys of a momentum encoder; local: number of local views.
        """
        if keys and self.keys == "never":
            raise ValueError(f"{self._name} takes no keys of a momentum encoder; valid: {_names('keys', 'never')}")
        if keys and len(self.sides) == 2:
            others = _names("keys", "never")
            raise ValueError(f"{self._name} takes no keys of a momentum encoder in mode bimodal; unimodal: {others}")
        if not keys and self.keys == "always":
            raise ValueError(f"{self._name} needs the keys of a momentum encoder")
        if local and not self.has_local:
            raise ValueError(f"{self._name} takes no local views; valid: {_names('has_local', False)}")

    def check_weights(self) -> None:
        """Raise ValueError unless the objective supports sample weights.

        A user's objective does if it inherits its step from one that does, or says so beside its own `compute_step`.
        """
        here = __name__.partition(".")[0]
        own = [vars(each) for each in type(self).__mro__ if each.__module__.partition(".")[0] != here]
        is_unsaid = any({"compute", "compute_step"} & each.keys() and "takes_weights" not in each for each in own)
        if not self.takes_weights or is_unsaid or type(self).loss is not Objective.loss:
            raise ValueError(f"{self._name} takes no weights of samples; valid: {_names('takes_weights', False)}")

    @property
    def _name(self) -> str:
        from . import OBJECTIVES  # late: the registry imports this module

        name = next((name for name, known in OBJECTIVES.items() if known is type(self)), type(self).__name__)
        return f"objective '{name}'"

    def loss(
        self, first: Tensor, second: Tensor, own: slice, state: Mapping[str, Tensor], progress: Progress
    ) -> Outcome:
        """Return the mean loss of this rank's samples, their new state and metrics; autograd differentiates the loss.

        For objectives that need no closed form: override this instead of `compute`. first, second: features of the
        global batch, [b, d]; own: the rows of this rank's samples in them. state: these samples', as in `forward`.
        Outcome.state needs no `visits`.
        """
        raise NotImplementedError(f"{self._name} has neither `loss` nor `compute`; write one of them")

    def compute(self, pairs: Pairs, batch: GlobalBatch, state: Mapping[str, Tensor], progress: Progress) -> Computed:
        """Return value, gradients and new state. Called without autograd; all ranks of the batch make the same calls.

        state: this rank's, as in `forward`. Objectives with a closed form override this; the rest override `loss`,
        whose gradients are averaged over all samples.
        """
        features, parameters = pairs.features.detach().requires_grad_(), list(self.parameters())
        with torch.enable_grad():
            outcome = self.loss(features[0], features[1], pairs.own, state, progress)
            rows = pairs.own.stop - pairs.own.start
            weight = rows * batch.world / pairs.batch  # of this rank's mean in the mean over ranks: 1 for equal shares
            gradients = torch.autograd.grad(
                weight * outcome.loss, [features, *parameters], allow_unused=True, materialize_grads=True
            )
        of_features = batch.sum(gradients[0])
        check_state(outcome.state, self.fields, rows, visits=False)
        return Computed(
            value=batch.sum(weight * outcome.loss.detach()) / batch.world,
            feature_gradients=lambda: of_features[:, pairs.own],
            parameter_gradients=[batch.sum(gradient) / batch.world for gradient in gradients[1:]],
            state={name: values.detach() for name, values in outcome.state.items()},
            metrics={name: batch.sum(weight * value.detach()) / batch.world for name, value in outcome.metrics.items()},
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # its products are one call each; tracing it only costs
    def forward(
        self,
        first: Tensor,
        second: Tensor,
        state: Mapping[str, Tensor],
        progress: Progress,
        keys: tuple[Tensor, Tensor] | None = None,
        local: Sequence[Tensor] = (),
    ) -> Outcome:
        """Return loss, gradients and new state of one step. Computes in the features' dtype, at least float32.

        keys: the momentum encoder's features of the same two views; no gradient reaches them. local: features of local
        views. All are unit-norm [b, d], like `first`. Raises ValueError for wrong shapes, state, keys or local views,
        and FeaturesError.
        """
        self.check_frame(keys is not None, len(local))
        batch = replace(GlobalBatch.of_this_process(self.communicating), shares=self.shares)
        views = [first, second, *local]
        self._check(first, {"second": second} | _numbered(keys=keys or (), local=local), batch)
        if WEIGHT in state:
            self.check_weights()
        check_state(state, self.fields, len(first))
        inputs: list[Tensor] = list(self.parameters())
        differentiable = torch.is_grad_enabled() and any(view.requires_grad for view in views)
        with torch.no_grad(), full_precision(first.device.type):
            self.project()
            pairs = self._pairs(views, keys, batch)
            likeness = self._likeness(pairs.features)
            computed = self.compute(pairs, batch, state, progress)
            gradients = computed.parameter_gradients
            if differentiable:
                inputs += views
                gradients = [*gradients, *computed.feature_gradients()]
        loss = attach_gradients(computed.value, inputs, gradients)
        if keys is not None:
            # The sum of both directions: a positive then pulls at only one anchor, as strongly as without keys, when it
            # pulls at both ends with half the weight.
            loss = 2 * loss
        # Through int64, because torch cannot add in uint32.
        visits = {name: (old.to(torch.int64) + 1).to(old.dtype) for name, old in state.items() if name == "visits"}
        return Outcome(loss, computed.state | visits, likeness | computed.metrics)

    def _likeness(self, features: Tensor) -> dict[str, Tensor]:
        """Return each side's mean cosine between two samples, at most 1; features: [2, b, d], of the global batch."""
        samples = features.shape[1]
        sums = nn.functional.normalize(features, dim=2).mean(1).square().sum(1) * samples  # with each sample itself
        likeness = (sums - 1) / (samples - 1)
        return self.by_side(likeness=likeness if len(self.sides) == 2 else likeness.mean(0, keepdim=True))

    def _pairs(self, views: list[Tensor], keys: tuple[Tensor, Tensor] | None, batch: GlobalBatch) -> Pairs:
        """Gather the features that anchors are compared with; the step's first exchange."""
        dtype = torch.float32
        for features in (*views, *(keys or ())):
            dtype = torch.promote_types(dtype, features.dtype)
        targets = batch.gather(torch.stack(keys or views[:2])).to(dtype)
        across, budget = self.across or keys is not None, self.settings.budget_on(targets.device)
        if keys is None and len(views) == 2:
            return self.pairs_of(targets, batch.own(len(views[0])), across=across, budget=budget)
        own = torch.stack(views).to(dtype)
        return Directed(own, targets, batch, across=across, constant=keys is not None, budget=budget)

    def by_side(self, **figures: Tensor) -> dict[str, Tensor]:
        """Return metrics per side; figures: [sides]."""
        return {
            f"{side}/{name}": values[number]
            for number, side in enumerate(self.sides)
            for name, values in figures.items()
        }

    def _check(self, first: Tensor, others: Mapping[str, Tensor], batch: GlobalBatch) -> None:
        """Raise ValueError unless all are [b, d] of equal shape, on all ranks, of 2 samples or more in all.

        On a GPU values are checked only in the first step, because reading them synchronises with the device.
        """
        for name, features in others.items():
            check_shapes(first, features, name)
        first_step = not self._looked_at_features
        if first_step:
            batch.check_alike(first)
        if len(first) * batch.world < 2:
            raise ValueError(f"features: a batch of {len(first)} sample has no negatives; use a batch of at least 2")
        if first_step or first.device.type == "cpu":
            self.check_values({"first": first, **others}, first_step=first_step)
        self._looked_at_features = True

    def check_values(self, features: Mapping[str, Tensor], *, first_step: bool) -> None:
        """Raise FeaturesError unless all are of unit norm or, without `unit_norm`, finite.

        Synchronises with the device.
        """
        check = check_unit_norm if self.unit_norm else check_finite
        for name, rows in features.items():
            check(name, rows)


def _names(attribute: str, without: object) -> str:
    """Return the names of the objectives whose attribute has another value than `without`."""
    from . import OBJECTIVES  # late: the registry imports this module

    return ", ".join(sorted(name for name, known in OBJECTIVES.items() if getattr(known, attribute) != without))


def _numbered(**views: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{kind}[{number}]": view for kind, given in views.items() for number, view in enumerate(given)}


def scalar_parameter(value: float) -> nn.Parameter:
    """Return a learnable scalar in float64, so that its initial value is exact even for features in float64."""
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def check_shapes(first: Tensor, other: Tensor, name: str) -> None:
    """Raise ValueError unless both are floating-point [b, d] of equal shape; name: of `other`."""
    if first.dim() != 2 or first.shape != other.shape:
        raise ValueError(
            f"features: first is {list(first.shape)} and {name} {list(other.shape)}; "
            "both must be [b, d], row i of each from the same sample"
        )
    if not (first.is_floating_point() and other.is_floating_point()):
        raise ValueError(f"features: first is {first.dtype} and {name} {other.dtype}; both must be floating point")


def check_unit_norm(name: str, features: Tensor) -> None:
    """Raise FeaturesError unless every row of `features` [b, d] has norm 1, within the round-off of its dtype.

    Synchronises with the device.
    """
    norms, of_norm_one = row_norms(features)
    off = ~of_norm_one
    if off.any():
        row = int(off.nonzero()[0])
        raise FeaturesError(
            f"features: row {row} of {name} has norm {norms[row].item():.6g}, and so {int(off.sum())} of {len(norms)} "
            "rows are not of norm 1; pass finite features through torch.nn.functional.normalize(…, dim=1)"
        )


def row_norms(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of every row of `features` [b, d], and whether it is 1 within the round-off of its dtype."""
    norms = torch.linalg.vector_norm(features.detach(), dim=1, dtype=torch.promote_types(features.dtype, torch.float32))
    slack = 1e-3 if features.dtype in (torch.float32, torch.float64) else 1e-2
    return norms, (norms - 1).abs() <= slack  # False for a NaN norm


def check_finite(name: str, features: Tensor) -> None:
    """Raise FeaturesError unless `features` [b, d] are finite. Synchronises with the device."""
    bad = ~features.detach().isfinite().all(1)
    if bad.any():
        raise FeaturesError(
            f"features: row {int(bad.nonzero()[0])} of {name} holds NaN or infinity, and so {int(bad.sum())} of "
            f"{len(bad)} rows are not finite; check the inputs of these samples, or lower the learning rate"
        )


def check_state(
    state: Mapping[str, Tensor], fields: Mapping[str, float], batch_size: int, *, visits: bool = True
) -> None:
    """Raise ValueError unless `state` holds every field, each [batch_size], and `visits` if there are any fields."""
    for name in (*fields, *(["visits"] if fields and visits else []), *([WEIGHT] if WEIGHT in state else [])):
        if name not in state:
            raise ValueError(f"state: '{name}' is missing; given {sorted(state)}")
        if state[name].shape != (batch_size,):
            raise ValueError(
                f"state: '{name}' is {list(state[name].shape)} but the batch has {batch_size} samples; "
                f"pass [{batch_size}], in the order of the features' rows"
            )
