"""The interface of an objective: settings, inputs, outcome; and the step shared by all objectives."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import cos, pi
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..uncompiled import uncompiled
from .gathering import Frame, GlobalBatch
from .pairs import Directed, Pairs, set_until

State = Mapping[str, Tensor]
"""Rows of a batch's samples by field, each [b]."""
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
    epochs: int = 1
    """Passes over the data of the whole run, at least 1."""

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
    precision: Literal["auto", "float32", "tf32"] = "auto"
    """Precision in which a GPU multiplies normalised features: tf32 changes gradients by less than 1e-3 of their norm,
    similarities by round-off only. auto is tf32 if the encoders of a run compute below float32, else float32."""
    compile: Literal["auto"] | bool = "auto"
    """Compile what is done with similarities between the products, for fewer passes over memory, which takes some
    seconds in the first step; results differ by round-off. auto: in a run on a GPU for which torch can compile."""

    def budget_on(self, device: torch.device) -> int:
        """Return `similarity_budget`, or the device's default."""
        return self.similarity_budget or (2**32 if device.type == "cuda" else 2**28)


@dataclass(frozen=True)
class TemperatureRate:
    """Learning rate of an objective's own parameters if they are a temperature's: no warm-up, no cosine, no decay."""

    lr: float
    """Learning rate, 0 or more."""
    slow_below: float | None = None
    """Divide the rate by 3 while the only parameter is below this; None: never."""


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Disable autocast and compute float32 products in true float32; restores the caller's settings at the end.

    A similarity in bfloat16 errs by 4e-3, which at a temperature of 0.005 is 0.8 in the exponent; TF32 by an eighth.
    """
    # Each backend's own switch: torch.get_float32_matmul_precision raises once the caller has used these.
    # torch's stubs do not know that the mkldnn module has `matmul`.
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    with ExitStack() as end, torch.autocast(device_type, enabled=False):
        for backend in backends:
            set_until(end, backend, "fp32_precision", "ieee")
        yield


class _FullPrecision(torch.autograd.Function):
    """A loss whose backward pass is in full precision as well, and ends at the step's inputs.

    A second backward pass computes the loss again, since the first freed its graph and overwrote its similarities.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: list[Tensor],
        again: Callable[[], Tensor],
        ranks: GlobalBatch | None,
        inner: list[Tensor],
        *inputs: Tensor,
    ) -> Tensor:
        """loss: the only element is the loss, whose graph begins at `inner`, which stand for `inputs`.

        ranks: average the parameters' gradients over them; None: every rank computes the whole batch's.
        """
        ctx.loss, ctx.again, ctx.ranks, ctx.inner = loss, again, ranks, inner
        return loss[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, in_loss: Tensor) -> tuple[Tensor | None, ...]:
        loss = ctx.loss.pop() if ctx.loss else ctx.again()
        # in_loss enters at the root: a loss scale must lift small gradients before float16 flushes them to zero.
        with full_precision(in_loss.device.type):
            found = torch.autograd.grad(loss, ctx.inner, in_loss, allow_unused=True, materialize_grads=True)
        if ctx.ranks is not None:
            pairs = zip(ctx.inner, found, strict=True)
            found = tuple(ctx.ranks.mean(of) if isinstance(each, nn.Parameter) else of for each, of in pairs)
        return (None, None, None, None, *found)


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
    """Whether `state` may have WEIGHT: factors of the terms of single samples, of which the loss is a mean."""

    is_whole: ClassVar[bool] = False
    """Whether `loss` is of the global batch, the same on every rank, instead of the mean over this rank's samples."""

    is_frozen: ClassVar[bool] = False
    """Whether nothing is trained: the encoders are in evaluation mode, and every sample is served."""

    known: ClassVar[Mapping[str, type["Objective"]]] = {}
    """All objectives by name, for messages; the registry sets it."""

    settings: Settings
    """The settings in use, with defaults filled in."""

    fields: dict[str, float]
    """Schema of the per-sample state: path of a field -> initial value for unseen samples."""

    temperature_rate: TemperatureRate | None = None
    """Set if the objective's own parameters are a temperature's."""

    across: bool = False
    """Whether similarities within a side are excluded, as they are in mode bimodal."""

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
        self.name = type(self).__name__
        """For messages; `create_objective` sets it."""
        self.settings = settings
        self.sides = ("image", "text") if mode == "bimodal" else ("sample",)
        self.across |= mode == "bimodal"
        self.row_fields = tuple(initial)
        self.fields = {f"{side}/{name}": value for side in self.sides for name, value in initial.items()}

    def project(self) -> None:
        """Clamp the objective's own parameters to their range, in place. Every step starts with this."""

    def advice(self, batch_size: int, *, keys: bool = False) -> list[str]:
        """Return warnings for a run with global batches of this size, with or without a momentum encoder's keys."""
        return []

    def check_frame(self, keys: bool, local: int) -> None:
        """Raise ValueError unless the objective supports these keys and local views.

        keys: whether each step has the keys of a momentum encoder; local: number of local views.
        """
        if keys and self.keys == "never":
            raise self._refusal("keys of a momentum encoder; valid", "keys", "never")
        if keys and len(self.sides) == 2:
            raise self._refusal("keys of a momentum encoder in mode bimodal; unimodal", "keys", "never")
        if not keys and self.keys == "always":
            raise ValueError(f"{self._named} needs the keys of a momentum encoder")
        if local and (not self.has_local or len(self.sides) == 2):
            raise self._refusal("local views; valid, in mode unimodal", "has_local", False)

    def check_weights(self) -> None:
        """Raise ValueError unless the objective supports sample weights."""
        if not self.takes_weights:
            raise self._refusal("weights of samples; valid", "takes_weights", False)

    @property
    def _named(self) -> str:
        return f"objective '{self.name}'"

    def _refusal(self, what: str, attribute: str, without: object) -> ValueError:
        """Return the error that names the objectives whose attribute has another value than `without`."""
        others = sorted(name for name, each in self.known.items() if getattr(each, attribute) != without)
        return ValueError(f"{self._named} takes no {what}: {', '.join(others)}")

    def loss(self, *args: Any, **kwargs: Any) -> Outcome:
        """`loss(first, second, own, state, progress)`: return the mean loss of this rank's samples, differentiable,
        their new state and metrics; with `is_whole` the loss of the global batch.

        first, second: features of the global batch, [b, d]; own: the rows of this rank's samples in them. state: these
        samples', as in `forward`; Outcome.state needs no `visits`.
        """
        raise NotImplementedError(f"{self._named} has no `loss`; write it")

    def step(self, frame: Frame, state: State, progress: Progress) -> Outcome:
        """Return the differentiable loss of the global batch, this rank's new state, and metrics.

        All ranks make the same calls. Objectives that compare samples override this; the rest override `loss`.
        """
        first, second = frame.features(summed=not self.is_whole)
        rows, ranks = frame.own.stop - frame.own.start, frame.ranks
        with torch.enable_grad():  # a loss may itself differentiate something, also where nobody asks for gradients
            outcome = self.loss(first, second, frame.own, state, progress)
        check_state(outcome.state, self.fields, rows, visits=False)
        if self.is_whole or ranks.world == 1:
            return outcome
        weight = rows * ranks.world / len(first)  # of this rank's mean in the mean over ranks: 1 for equal shares
        names, figures = ["", *outcome.metrics], [outcome.loss, *outcome.metrics.values()]
        means = ranks.mean(weight * torch.stack([figure.detach().to(first) for figure in figures]))
        of_batch = dict(zip(names, means, strict=True))
        return Outcome(of_batch.pop("") + slope(weight * outcome.loss), outcome.state, of_batch)

    @uncompiled  # its products are one call each; tracing it only costs
    def forward(
        self,
        first: Tensor,
        second: Tensor,
        state: State,
        progress: Progress,
        keys: tuple[Tensor, Tensor] | None = None,
        local: Sequence[Tensor] = (),
    ) -> Outcome:
        """Return loss, gradients and new state of one step. Computes in the features' dtype, at least float32.

        keys: the momentum encoder's features of the same two views; no gradient reaches them. local: features of local
        views. All are unit-norm [b, d] like `first`. Raises FeaturesError, ValueError for a wrong shape, state or view.
        """
        self.check_frame(keys is not None, len(local))
        ranks = replace(GlobalBatch.of_this_process(self.communicating), shares=self.shares)
        views = [first, second, *local]
        others = {"second": second}
        others |= {f"keys[{number}]": view for number, view in enumerate(keys or ())}
        others |= {f"local[{number}]": view for number, view in enumerate(local)}
        self._check(first, others, ranks)
        if WEIGHT in state:
            self.check_weights()
        check_state(state, self.fields, len(first))
        inputs = [each for each in (*views, *self.parameters()) if each.requires_grad and torch.is_grad_enabled()]
        inner = [view.detach().requires_grad_(view.requires_grad and bool(inputs)) for view in views]
        with torch.no_grad():
            self.project()

        def step() -> Outcome:
            with torch.set_grad_enabled(bool(inputs)), full_precision(first.device.type):
                frame = Frame.of(torch.stack(inner), None if keys is None else torch.stack(keys).detach(), ranks)
                likeness = self._likeness(frame.targets)  # now, as the step keeps similarities in memory
                outcome = self.step(frame, state, progress)
                return replace(outcome, metrics=likeness | outcome.metrics)

        outcome = step()
        loss = outcome.loss.detach()
        if inputs:
            begin = [each for each in (*inner, *self.parameters()) if each.requires_grad]
            average = None if self.is_whole else ranks
            loss = _FullPrecision.apply([outcome.loss], lambda: step().loss, average, begin, *inputs)  # type: ignore[no-untyped-call]
        if keys is not None:
            # The sum of both directions: a positive then pulls at only one anchor, as strongly as without keys, when it
            # pulls at both ends with half the weight.
            loss = 2 * loss
        new, metrics = ({name: of.detach() for name, of in each.items()} for each in (outcome.state, outcome.metrics))
        # Through int64, because torch cannot add in uint32.
        new |= {name: (old.to(torch.int64) + 1).to(old.dtype) for name, old in state.items() if name == "visits"}
        return Outcome(loss, new, metrics)

    def compared(self, frame: Frame) -> Pairs:
        """Return the similarities of the step's anchors with their candidates."""
        targets, settings, is_directed = frame.targets, self.settings, frame.has_keys or len(frame.views) > 2
        given: Any = {"across": self.across or frame.has_keys, "budget": settings.budget_on(targets.device)}
        pairs: Pairs = Directed(frame, **given) if is_directed else self.pairs_of(targets, frame.own, **given)
        can_round = self.unit_norm and targets.dtype == torch.float32
        pairs.tf32 = can_round and targets.is_cuda and settings.precision == "tf32"
        pairs.compiled = settings.compile is True and self.unit_norm
        return pairs

    def retrieval(self, margin: Tensor) -> dict[str, Tensor]:
        """Return each side's share of anchors whose positive is the most alike, as a metric; margin: [k, b]."""
        nearest = (margin.detach() > 0).to(margin.dtype)
        return self.by_side(retrieval_accuracy=nearest.reshape(len(self.sides), -1).mean(1))

    def _likeness(self, features: Tensor) -> dict[str, Tensor]:
        """Return each side's mean cosine between two samples, at most 1; features: [2, b, d], of the global batch."""
        samples = features.shape[1]
        sums = nn.functional.normalize(features, dim=2).mean(1).square().sum(1) * samples  # with each sample itself
        likeness = (sums - 1) / (samples - 1)
        return self.by_side(likeness=likeness if len(self.sides) == 2 else likeness.mean(0, keepdim=True))

    def by_side(self, **figures: Tensor) -> dict[str, Tensor]:
        """Return metrics per side; figures: [sides]."""
        return {f"{side}/{name}": of[k] for k, side in enumerate(self.sides) for name, of in figures.items()}

    def _check(self, first: Tensor, others: Mapping[str, Tensor], batch: GlobalBatch) -> None:
        """Raise ValueError unless all are floating-point [b, d] of equal shape, on all ranks, of 2 samples or more.

        On a GPU values are checked only in the first step, because reading them synchronises with the device.
        """
        for name, other in others.items():
            if first.dim() != 2 or first.shape != other.shape:
                raise ValueError(
                    f"features: first is {list(first.shape)} and {name} {list(other.shape)}; "
                    "both must be [b, d], row i of each from the same sample"
                )
            if not (first.is_floating_point() and other.is_floating_point()):
                raise ValueError(f"features: first is {first.dtype}, {name} {other.dtype}; both must be floating point")
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
        for name, rows in features.items():
            norms, of_norm_one = row_norms(rows)
            off = ~of_norm_one if self.unit_norm else ~rows.detach().isfinite().all(1)
            if not off.any():
                continue
            row, count = int(off.nonzero()[0]), f"{int(off.sum())} of {len(off)}"
            if self.unit_norm:
                raise FeaturesError(
                    f"features: row {row} of {name} has norm {norms[row].item():.6g}, and so {count} rows are not of "
                    "norm 1; pass finite features through torch.nn.functional.normalize(…, dim=1)"
                )
            raise FeaturesError(
                f"features: row {row} of {name} holds NaN or infinity, and so {count} rows are not finite; check the "
                "inputs of these samples, or lower the learning rate"
            )


def slope(of: Tensor) -> Tensor:
    """Return 0 with the gradient of `of`: of a loss whose gradient is not its value's."""
    return of - of.detach()


def scalar_parameter(value: float) -> nn.Parameter:
    """Return a learnable scalar in float64, so that its initial value is exact even for features in float64."""
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def row_norms(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of every row of `features` [b, d], and whether it is 1 within the round-off of its dtype."""
    norms = torch.linalg.vector_norm(features.detach(), dim=1, dtype=torch.promote_types(features.dtype, torch.float32))
    slack = 1e-3 if features.dtype in (torch.float32, torch.float64) else 1e-2
    return norms, (norms - 1).abs() <= slack  # False for a NaN norm


def check_state(state: State, fields: Mapping[str, float], rows: int, *, visits: bool = True) -> None:
    """Raise ValueError unless `state` holds every field, each [rows], and `visits` if there are any fields."""
    for name in (*fields, *(["visits"] if fields and visits else []), *([WEIGHT] if WEIGHT in state else [])):
        if name not in state:
            raise ValueError(f"state: '{name}' is missing; given {sorted(state)}")
        if state[name].shape != (rows,):
            raise ValueError(
                f"state: '{name}' is {list(state[name].shape)} but the batch has {rows} samples; "
                f"pass [{rows}], in the order of the features' rows"
            )
