"""SimCo: NT-Xent across views, whose anchors are weighted at a second temperature (Zhang et al., CVPR 2022)."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from .base import Progress, Settings
from .contrastive import Anchors, Contrastive, Rows, Step
from .ntxent import NtxentSettings
from .pairs import Pairs
from .softmax_sums import accumulate

_TINY = -36.0
"""Log of a sum of weights below which log(1 + sum) and sum / (1 + sum) agree to the last bit."""


class SimcoSettings(NtxentSettings, frozen=True):
    tau_beta: float = Field(default=1.0, ge=1e-4, le=100.0)
    """Temperature of the anchors' weights, 0.0001 to 100; ten times tau in the authors' code."""


class Simco(Contrastive):
    """Dual-temperature loss of two views, mean of both directions; no per-sample state.

    With W_i(t) the softmax weight at temperature t of the anchor's negatives, the other samples in the other view,
    value: mean over anchors of W_i(tau_beta) / W_i(tau) · -log(1 - W_i(tau)), the fraction not differentiated.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": SimcoSettings}

    settings: SimcoSettings

    def __init__(self, mode: str, settings: SimcoSettings) -> None:
        super().__init__(mode, settings)
        self.across = True

    def temperature(self, rows: Rows, like: Tensor) -> Tensor:
        return like.new_full((), self.settings.tau)

    def further_sums(self, pairs: Pairs) -> Rows:
        tau = pairs.features.new_full((2, pairs.own.stop - pairs.own.start), self.settings.tau_beta)
        sums, (first, second) = accumulate(pairs, tau), pairs.features[:, pairs.own]
        return {"log_sum_beta": sums.total.log() + (sums.peak - (first * second).sum(1)) / tau}

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        weight, log_sum = rows["log_sum_beta"].sigmoid(), anchors.log_sum
        # The positive is a candidate too, with exponent 0: W = sigmoid(log sum).
        loss = torch.where(log_sum < _TINY, 1.0, F.softplus(log_sum) / log_sum.clamp(min=_TINY).sigmoid())
        return Step(anchors.weighted(weight * loss).mean(), weight / self.settings.tau * self.share(anchors))
