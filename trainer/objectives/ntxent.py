"""Mini-batch losses of two views: SimCLR's NT-Xent, its decoupled forms DCL, DCLW and FlatNCE, SimCo and MoCo v3."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from .base import Outcome, Progress, Settings, slope
from .contrastive import Anchors, Contrastive, Rows, accumulate
from .distances import CosineOrDistance, SimilaritySettings
from .pairs import Pairs

_TINY = -36.0
"""Log of a sum of weights below which log(1 + sum) and sum / (1 + sum) agree to the last bit."""


class NtxentSettings(Settings, frozen=True):
    tau: float = Field(default=0.1, ge=1e-4, le=100.0)
    """Temperature, 0.0001 to 100. iSogCLR tunes SimCLR's in {0.1, 0.3, 0.5, 0.7} (section 6)."""


class SimclrSettings(NtxentSettings, SimilaritySettings, frozen=True):
    """Settings of SimCLR."""


class DclwSettings(NtxentSettings, frozen=True):
    sigma: float = Field(default=0.5, gt=0.0)
    """Width of the von Mises-Fisher weights, above 0. DCL (Yeh et al., ECCV 2022), section 3."""


class SimcoSettings(NtxentSettings, frozen=True):
    tau_beta: float = Field(default=1.0, ge=1e-4, le=100.0)
    """Temperature of the anchors' weights, 0.0001 to 100; ten times tau in the authors' code."""


class MocoV3Settings(Settings, frozen=True):
    tau: float = Field(default=0.2, ge=1e-4, le=100.0)
    """Temperature, 0.0001 to 100. 0.2 with ViT; 1.0 in the ResNet-50 runs of the authors' code."""


class _Views(Contrastive):
    """A loss of both views' anchors at a constant temperature; no state."""

    settings: NtxentSettings

    def temperature(self, rows: Rows, features: Tensor) -> Tensor:
        return features.new_full((), self.settings.tau)


class Simclr(_Views, CosineOrDistance):
    """NT-Xent: cross-entropy of each of 2b anchors over its 2b - 1 candidates (Chen et al., ICML 2020, eq 1).

    A local view is an anchor twice, against either global view of its sample and both global views of all others.
    """

    settings_of_mode: ClassVar = {"unimodal": SimclrSettings}
    has_local = True

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        # The positive is a candidate too, with exponent 0.
        return Outcome(anchors.mean(F.softplus(anchors.log_sum)), {}, {})


class Dcl(_Views):
    """NT-Xent without the positive in the denominator (DCL, Yeh et al., ECCV 2022, eq 6)."""

    settings_of_mode: ClassVar = {"unimodal": NtxentSettings}

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        return Outcome(anchors.mean(anchors.log_sum), {}, {})


class Dclw(_Views):
    """DCL with weighted positives: less weight for pairs that are already similar (DCL, section 3).

    The weight is 2 - exp(positive / sigma) divided by its mean in the batch, and is not differentiated.
    """

    settings_of_mode: ClassVar = {"unimodal": DclwSettings}
    settings: DclwSettings

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        positive = anchors.positive
        weight = 2 - (positive.detach() / self.settings.sigma).softmax(1) * positive.shape[1]
        # log_sum is relative to the positive, so only the weight's excess over 1 is added.
        return Outcome(anchors.mean(anchors.log_sum + (1 - weight) * positive / self.settings.tau), {}, {})


class Flatnce(_Views):
    """FlatNCE (Chen et al., 2021): DCL's gradient, and NT-Xent's value for display, since its own is always 1."""

    settings_of_mode: ClassVar = {"unimodal": NtxentSettings}

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        log_sum = anchors.log_sum
        return Outcome(anchors.mean(F.softplus(log_sum.detach()) + slope(log_sum)), {}, {})


class Simco(_Views):
    """SimCo: NT-Xent across views, whose anchors are weighted at a second temperature (Zhang et al., CVPR 2022).

    Mean of both directions; no per-sample state. With W_i(t) the softmax weight at temperature t of the anchor's
    negatives, the other samples in the other view, value: mean over anchors of W_i(tau_beta) / W_i(tau) ·
    -log(1 - W_i(tau)), the fraction not differentiated.
    """

    settings_of_mode: ClassVar = {"unimodal": SimcoSettings}
    settings: SimcoSettings
    across = True

    def further_sums(self, pairs: Pairs) -> Rows:
        tau = pairs.features.new_full((2, pairs.own.stop - pairs.own.start), self.settings.tau_beta)
        sums, (first, second) = accumulate(pairs, tau), pairs.features[:, pairs.own]
        return {"log_sum_beta": sums.total.log() + (sums.peak - (first * second).sum(1)) / tau}

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        # The positive is a candidate too, with exponent 0: W = sigmoid(log sum), and -log(1 - W) = softplus(log sum).
        weight, log_sum = rows["log_sum_beta"].sigmoid(), anchors.log_sum.detach()
        ratio = torch.where(log_sum < _TINY, 1.0, F.softplus(log_sum) / log_sum.clamp(min=_TINY).sigmoid())
        # The gradient is that of W(tau_beta) · log sum, finite where W(tau) is 0.
        return Outcome(anchors.mean(weight * ratio + slope(weight * anchors.log_sum)), {}, {})


class MocoV3(_Views):
    """MoCo v3: InfoNCE over a batch's keys, times 2 tau, summed over both directions (Chen et al., ICCV 2021).

    No queue, no per-sample state. Value: the sum over directions (first view, second key) and (second view, first key)
    of (2 tau / b) · sum_i [log sum_j exp(q_i·k_j / tau) - q_i·k_i / tau]. MoCo v3 algorithm 1. With m local views:
    2 / T of the sum over the T = 2 (1 + m) directions.
    """

    settings_of_mode: ClassVar = {"unimodal": MocoV3Settings}
    keys = "always"
    has_local = True

    def loss(self, anchors: Anchors, rows: Rows, progress: Progress) -> Outcome:
        # The positive is a candidate too, with exponent 0.
        return Outcome(2 * self.settings.tau * anchors.mean(F.softplus(anchors.log_sum)), {}, {})
