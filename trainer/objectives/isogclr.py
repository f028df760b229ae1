"""iSogCLR: the robust global contrastive loss, with a temperature for every sample (Qiu et al., ICML 2023)."""

import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from .base import Objective, Outcome, Progress, Settings, check_features, check_state, count_visit, working_dtype
from .closed_form import attach_gradients
from .contrast import EXCLUDED, bimodal_gradients, contrast, unimodal_gradients
from .estimator import EstimatorSettings, log_with_eps, update_log_s
from .precision import full_precision
from .schedules import cosine_by_epoch


class IsogclrSettings(EstimatorSettings, frozen=True):
    """What both modes share. The starting values of the paper's runs on image-text pairs, but for rho."""

    rho: float = Field(default=2.0, ge=0.0)
    """KL radius of the robust loss, 0 or more. It binds only below log(number of negatives): near that every tau falls
    to tau_min. 2.0 suits 256 pairs; the paper has 5.8 to 6.4 with 512 pairs of CC3M. iSogCLR eq 7."""
    tau_init: float = Field(default=0.01, gt=0.0)
    """Temperature of a sample not seen before; dimensionless, within tau_min and tau_max."""
    tau_min: float = Field(default=0.005, ge=1e-4)
    """Floor after each update, 0.0001 or more (tau_0 of iSogCLR eq 7)."""
    tau_max: float = Field(default=1.0, gt=0.0)
    """Ceiling after each update, not below tau_min (iSogCLR algorithm 1, step 9)."""
    eta: float = Field(default=0.01, ge=0.0)
    """Step size of tau, 0 or more; 0 holds every tau where it is. The 1/n of iSogCLR eq 13 is part of it."""
    eta_min: float = Field(default=0.0, ge=0.0)
    """Where the cosine of eta ends, in [0, eta]; used only with eta_decay_epochs."""
    eta_decay_epochs: int | None = Field(default=None, ge=1)
    """Epochs, 1 or more, in which eta falls by a cosine to eta_min; unset: constant."""
    beta_u: float = Field(default=0.9, gt=0.0, le=1.0)
    """Weight of the new gradient in u, in (0, 1]; 1 keeps no memory (beta_1 of iSogCLR algorithm 1)."""
    grad_clip: float = Field(default=5.0, gt=0.0)
    """Bound on a temperature gradient's size before it enters u, above 0."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.tau_min <= self.tau_init <= self.tau_max:
            raise ValueError(
                f"tau_min {self.tau_min} <= tau_init {self.tau_init} <= tau_max {self.tau_max} does not hold; "
                "move the bounds or tau_init"
            )
        if self.eta_decay_epochs is not None and self.eta_min > self.eta:
            raise ValueError(f"eta_min {self.eta_min} is above eta {self.eta}, where the cosine begins; lower eta_min")
        return self

    def eta_at(self, progress: Progress) -> float:
        """The step size of tau in this step."""
        if self.eta_decay_epochs is None:
            return self.eta
        return cosine_by_epoch(progress, self.eta, self.eta_min, self.eta_decay_epochs)


class IsogclrUnimodalSettings(IsogclrSettings, frozen=True):
    """The starting values of the paper's runs on images, which need softer temperatures."""

    rho: float = Field(default=0.3, ge=0.0)
    """KL radius of the robust loss, 0 or more; 0.1 to 0.4 in the paper. iSogCLR eq 7."""
    tau_init: float = Field(default=0.7, gt=0.0)
    """Temperature of a sample not seen before; dimensionless, within tau_min and tau_max."""
    tau_min: float = Field(default=0.05, ge=1e-4)
    """Floor after each update, 0.0001 or more (tau_0 of iSogCLR eq 7)."""
    grad_clip: float = Field(default=3.0, gt=0.0)
    """Bound on a temperature gradient's size before it enters u, above 0."""


class Rows(NamedTuple):
    """The state of one side of a batch, each [b]."""

    log_s: Tensor
    tau: Tensor
    u: Tensor


class SideStep(NamedTuple):
    """What a step makes of one side."""

    rows: Rows
    """The new state."""
    ratio: Tensor
    """[anchors per sample, b], g / (s' + eps): the weights p of an anchor are its softmax times this."""
    value: Tensor
    """Scalar, the side's share of the objective."""
    gradient: Tensor
    """[b], G: the gradient in tau, before clipping."""


def step_side(
    rows: Rows, log_g: Tensor, mean_exponent: Tensor, settings: IsogclrSettings, progress: Progress
) -> SideStep:
    """Renew one side's state from what its anchors saw; the temperatures used in the step are the old ones.

    log_g, mean_exponent: [anchors per sample, b] (1 anchor bimodal; 2 unimodal, which share the sample's row): log of
    the mean of exp(h / tau) over the anchor's negatives, and the mean of h / tau under their softmax.
    Source: iSogCLR eq 12, 13 and 17-20 and algorithm 1; G uses the new s, as FastCLIP eq 9 does.
    """
    log_s = update_log_s(rows.log_s, log_g.logsumexp(0) - math.log(len(log_g)), settings.gamma_at(progress))
    log_s_eps = log_with_eps(log_s, settings.eps)
    ratio = (log_g - log_s_eps).exp()
    gradient = log_s_eps + settings.rho - (ratio * mean_exponent).mean(0)
    u = (1.0 - settings.beta_u) * rows.u + settings.beta_u * gradient.clamp(-settings.grad_clip, settings.grad_clip)
    tau = (rows.tau - settings.eta_at(progress) * u).clamp(settings.tau_min, settings.tau_max)
    value = (rows.tau * (log_s_eps + settings.rho)).mean()
    return SideStep(Rows(log_s, tau, u), ratio, value, gradient)


def compare_pairs(
    first: Tensor, second: Tensor, rows: list[Rows], settings: IsogclrSettings, progress: Progress
) -> tuple[list[SideStep], list[Tensor]]:
    """Bimodal: each image against the other samples' texts, each text against their images.

    first, second: [b, d]; rows: of both sides. Gives both sides' steps and the gradients in first and second.
    Source: iSogCLR eq 15-21.
    """
    samples = len(first)
    similarities = first @ second.T
    positives = similarities.diagonal().clone()
    similarities.fill_diagonal_(EXCLUDED)
    sides = (
        contrast(similarities, positives, rows[0].tau, dim=1, out=torch.empty_like(similarities)),
        contrast(similarities, positives, rows[1].tau, dim=0, out=similarities),
    )
    steps = [
        step_side(row, (side.log_sum - math.log(samples - 1))[None], side.mean_exponent[None], settings, progress)
        for row, side in zip(rows, sides, strict=True)
    ]
    pulls = (steps[0].ratio[0] / samples, steps[1].ratio[0] / samples)
    return steps, list(bimodal_gradients(first, second, sides, pulls))


def compare_views(
    first: Tensor, second: Tensor, rows: list[Rows], settings: IsogclrSettings, progress: Progress
) -> tuple[list[SideStep], list[Tensor]]:
    """Unimodal: each of a sample's two views against both views of every other sample.

    first, second: [b, d]; rows: the one side's. Gives its step and the gradients in first and second.
    Source: iSogCLR eq 3 and 11-14.
    """
    samples = len(first)
    views = torch.cat([first, second])
    similarities = views @ views.T
    positives = similarities.diagonal(samples).repeat(2)
    for offset in (-samples, 0, samples):
        similarities.diagonal(offset).fill_(EXCLUDED)
    anchors = contrast(similarities, positives, rows[0].tau.repeat(2), dim=1, out=similarities)
    log_g = (anchors.log_sum - math.log(2 * samples - 2)).view(2, samples)
    step = step_side(rows[0], log_g, anchors.mean_exponent.view(2, samples), settings, progress)
    gradients = unimodal_gradients(views, anchors, step.ratio.flatten() / (2 * samples))
    return [step], [gradients[:samples], gradients[samples:]]


def side_metrics(before: Rows, step: SideStep, settings: IsogclrSettings) -> dict[str, Tensor]:
    """Scalars of one side: the new temperatures, the shares at a bound, the new log_s, the share unseen, mean |G|."""
    tau = step.rows.tau
    return {
        "tau_mean": tau.mean(),
        "tau_lowest": tau.amin(),
        "tau_highest": tau.amax(),
        "share_at_tau_min": (tau <= settings.tau_min).to(tau.dtype).mean(),
        "share_at_tau_max": (tau >= settings.tau_max).to(tau.dtype).mean(),
        "log_s_mean": step.rows.log_s.mean(),
        "share_unseen": torch.isneginf(before.log_s).to(tau.dtype).mean(),
        "tau_gradient_mean_abs": step.gradient.abs().mean(),
    }


class Isogclr(Objective):
    """Robust global contrastive loss with individual temperatures, bimodal or unimodal.

    Value: (1/b) sum over samples and sides of tau · (log(s' + eps) + rho). The gradient of the features is that of
    (1/b) sum p_ij h_ij with the weights p held constant (iSogCLR eq 14 and 21), not the derivative of the value.
    State: log_s, tau, u of each side: `first/…` and `second/…`, or, unimodal, `sample/…`, shared by both views.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {
        "bimodal": IsogclrSettings,
        "unimodal": IsogclrUnimodalSettings,
    }

    settings: IsogclrSettings

    def __init__(self, mode: str, settings: IsogclrSettings) -> None:
        super().__init__()
        self.settings = settings
        self.sides = ("first", "second") if mode == "bimodal" else ("sample",)
        initial = {"log_s": -math.inf, "tau": settings.tau_init, "u": 0.0}
        self.fields = {f"{side}/{field}": value for side in self.sides for field, value in initial.items()}
        self._compare = compare_pairs if mode == "bimodal" else compare_views

    def advice(self, batch_size: int) -> list[str]:
        """Tell of a rho that cannot bind: the KL divergence from uniform weights is at most log(negatives)."""
        negatives = batch_size - 1 if len(self.sides) == 2 else 2 * batch_size - 2
        highest = math.log(negatives)
        if self.settings.rho < highest:
            return []
        return [
            f"rho {self.settings.rho} is not below log({negatives:,} negatives) = {highest:.2f}: it never binds, and "
            "every tau falls to tau_min. Lower rho, or raise the batch size."
        ]

    def forward(self, first: Tensor, second: Tensor, state: Mapping[str, Tensor], progress: Progress) -> Outcome:
        """See Objective. `state` holds `fields` and `visits`. Computed in the features' dtype, at least float32."""
        check_features(first, second)
        check_state(state, self.fields, len(first))
        dtype = working_dtype(first, second)
        before = [Rows(*(state[f"{side}/{field}"].to(dtype) for field in Rows._fields)) for side in self.sides]
        with torch.no_grad(), full_precision(first.device.type):
            steps, gradients = self._compare(first.to(dtype), second.to(dtype), before, self.settings, progress)
            value = torch.stack([step.value for step in steps]).sum()
        new_state = {"visits": count_visit(state["visits"])}
        metrics: dict[str, Tensor] = {}
        for side, rows, step in zip(self.sides, before, steps, strict=True):
            for field, values in step.rows._asdict().items():
                new_state[f"{side}/{field}"] = values.to(state[f"{side}/{field}"].dtype)
            metrics |= {f"{side}/{name}": figure for name, figure in side_metrics(rows, step, self.settings).items()}
        return Outcome(attach_gradients(value, [first, second], gradients), new_state, metrics)
