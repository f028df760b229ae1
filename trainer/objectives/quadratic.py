"""Losses that are quadratic in the similarities: AUC-CL and the spectral contrastive loss.

AUC-CL maximises the area under the ROC curve (Sharma et al., ICLR 2024): eq 8, and with learn_a and learn_alpha the
min-max problem of eq 5 to 7. The spectral loss factorises the graph of augmented views (HaoChen et al., NeurIPS 2021).
"""

import math
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from .base import Objective, Outcome, Progress, Settings, State, scalar_parameter, slope
from .contrastive import PowerSums
from .gathering import Frame


class AucClSettings(Settings, frozen=True):
    """Settings of AUC-CL. The defaults are eq 8; the authors' code has another form (docs/method.md)."""

    a: float = Field(default=1.0, gt=0.0, le=20.0)
    """Target similarity of positives, in (0, 20]; the initial value if it is learned. AUC-CL eq 8; 10 in the authors'
    code."""
    learn_a: bool = False
    """Learn a, as in eq 7, where it tends to the positives' mean similarity."""
    b: float = Field(default=0.0, ge=-1.0, le=1.0)
    """Target similarity of negatives, in [-1, 1]; the initial value if it is learned. AUC-CL eq 8."""
    learn_b: bool = True
    """Learn b, as in eq 8; the authors' ImageNet runs keep it at 0."""
    alpha: float = Field(default=0.5, ge=0.0)
    """Margin, 0 or more; 0.1 to 1 train, 0 collapses. AUC-CL table 11. The initial value if it is learned."""
    learn_alpha: bool = False
    """Learn alpha by gradient ascent, as in eq 5 to 7, where it tends to 1 minus the positives' mean similarity plus
    the mean sum of the negatives', of either sign."""
    similarity: Literal["cos", "shifted"] = "cos"
    """The cosine, or (1 + cosine) / 2, as in the authors' code."""
    negatives: Literal["sum", "weighted"] = "sum"
    """Weight of a negative: 1, or p / anchors, which gives their sum the same weight at any batch size."""
    p: float = Field(default=32.0, gt=0.0)
    """Above 0; used only with negatives = "weighted". 32 in the authors' ImageNet runs."""
    views: Literal["across", "all"] = "across"
    """across: anchors are the first view, negatives the other samples' second view, as in eq 8. all: anchors are both
    views, negatives both views of the other samples, as in the authors' CIFAR runs."""


class AucCl(Objective):
    """Squared AUC loss of two views; no temperature, no per-sample state.

    Value: mean over anchors of (s - a)² + w sum_z (s_z - b)² + 2 alpha (1 - s + w sum_z s_z) - alpha², with s the
    similarity of the anchor to its positive, s_z its similarities to its negatives, and w the weight of a negative.
    AUC-CL eq 8; eq 7 where a, b and alpha are learned. With keys: the sum over both directions. With local views: the
    mean over directions, doubled with keys.
    """

    settings_of_mode: ClassVar = {"unimodal": AucClSettings}
    keys = "optional"
    has_local = True
    is_whole = True
    settings: AucClSettings
    a: Tensor
    b: Tensor
    alpha: Tensor

    def __init__(self, mode: str, settings: AucClSettings) -> None:
        super().__init__(mode, settings)
        self.across = settings.views == "across"
        for name in ("a", "b", "alpha"):
            value = scalar_parameter(getattr(settings, name))
            if getattr(settings, f"learn_{name}"):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value.detach(), persistent=False)

    def check_frame(self, keys: bool, local: int) -> None:
        super().check_frame(keys, local)
        if self.settings.views == "all" and (keys or local):
            raise ValueError("objective 'auc_cl': views = 'all' takes neither keys nor local views; use 'across'")

    def step(self, frame: Frame, state: State, progress: Progress) -> Outcome:
        settings, pairs = self.settings, self.compared(frame)
        positive, total, squares, peak = PowerSums.apply(frame.views, pairs, frame.ranks)  # type: ignore[no-untyped-call]
        a, b, alpha = (each.clone().to(positive.dtype) for each in (self.a, self.b, self.alpha))
        alpha = alpha - 2 * slope(alpha)  # eq 7's maximum: its gradient is reversed, as optimisers descend
        margin, negatives = positive - peak, pairs.negatives
        if settings.similarity == "shifted":
            squares = (negatives + 2 * total + squares) / 4
            positive, total = (1 + positive) / 2, (negatives + total) / 2
        # eq 8, where w is 1, and eq 7, in whose last term the batch's means are a(w) and b(w), as it is linear in them
        w = 1.0 if settings.negatives == "sum" else settings.p / (pairs.batch * (1 if self.across else 2))
        from_b = squares - 2 * b * total + negatives * b.square()  # the mean over anchors of sum_z (s_z - b)²
        loss = (positive - a).square().mean() + w * from_b + 2 * alpha * (1 - positive.mean() + w * total) - alpha**2
        learned = {name: value.detach().clone() for name, value in (("b", self.b), *self.named_parameters())}
        return Outcome(loss, {}, learned | self.retrieval(margin))

    def project(self) -> None:
        self.b.clamp_(-1.0, 1.0)


class SpectralSettings(Settings, frozen=True):
    mu: float = Field(default=1.0, gt=0.0)
    """Largest squared norm, above 0: longer features are shortened to it. The authors' code uses 1 on CIFAR-10 and 10
    on ImageNet."""


class Spectral(Objective):
    """Spectral loss of two views; features of any norm, no per-sample state.

    With y = z where |z|² < mu, otherwise √mu · z / |z|, value: (1/mu) · (-2 mean_i y_i·y'_i + mean of (y_i·y'_j)² over
    i != j). Eq 6 of the paper; the ball and 1/mu come from the authors' code.
    """

    settings_of_mode: ClassVar = {"unimodal": SpectralSettings}
    settings: SpectralSettings
    unit_norm = False
    is_whole = True
    across = True

    def step(self, frame: Frame, state: State, progress: Progress) -> Outcome:
        views, ranks = self._in_ball(frame.views), frame.ranks
        targets = views.detach() if ranks.world == 1 else self._in_ball(frame.targets)
        pairs = self.compared(replace(frame, targets=targets))
        positive, _, squares, peak = PowerSums.apply(views, pairs, ranks)  # type: ignore[no-untyped-call]
        loss = (squares / pairs.negatives - 2 * positive.mean()) / self.settings.mu
        return Outcome(loss, {}, self.retrieval(positive - peak))

    def _in_ball(self, features: Tensor) -> Tensor:
        radius = math.sqrt(self.settings.mu)
        norms: Tensor = torch.linalg.vector_norm(features, dim=2, keepdim=True)
        return features * (radius / norms.clamp(min=radius))
