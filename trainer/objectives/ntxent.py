"""Mini-batch losses of two views: SimCLR's NT-Xent and its decoupled forms DCL, DCLW and FlatNCE."""

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from .base import Progress, Settings
from .contrastive import Anchors, Contrastive, Rows, Step
from .distances import CosineOrDistance, SimilaritySettings


class NtxentSettings(Settings, frozen=True):
    tau: float = Field(default=0.1, ge=1e-4, le=100.0)
    """Temperature, 0.0001 to 100. iSogCLR tunes SimCLR's in {0.1, 0.3, 0.5, 0.7} (section 6)."""


class SimclrSettings(NtxentSettings, SimilaritySettings, frozen=True):
    """Settings of SimCLR."""


class DclwSettings(NtxentSettings, frozen=True):
    sigma: float = Field(default=0.5, gt=0.0)
    """Width of the von Mises-Fisher weights, above 0. DCL (Yeh et al., ECCV 2022), section 3."""


class _Views(Contrastive):
    """Mean over both views' anchors of -(weight / tau) · positive + log of a sum over candidates; no state."""

    settings: NtxentSettings

    def temperature(self, rows: Rows, like: Tensor) -> Tensor:
        return like.new_full((), self.settings.tau)


class Simclr(_Views, CosineOrDistance):
    """NT-Xent: cross-entropy of each of 2b anchors over its 2b - 1 candidates (Chen et al., ICML 2020, eq 1).

    A local view is an anchor twice, against either global view of its sample and both global views of all others.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": SimclrSettings}
    has_local = True

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        # The positive is a candidate too, with exponent 0.
        weight = anchors.log_sum.sigmoid() / self.settings.tau * self.share(anchors)
        return Step(anchors.weighted(F.softplus(anchors.log_sum)).mean(), weight)


class Dcl(_Views):
    """NT-Xent without the positive in the denominator (DCL, Yeh et al., ECCV 2022, eq 6)."""

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": NtxentSettings}

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        weight = torch.full_like(anchors.log_sum, 1.0 / self.settings.tau) * self.share(anchors)
        return Step(anchors.weighted(anchors.log_sum).mean(), weight)


class Flatnce(Dcl):
    """FlatNCE (Chen et al., 2021): DCL's gradient, and NT-Xent's value for display, since its own is always 1."""

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        value = anchors.weighted(F.softplus(anchors.log_sum)).mean()
        return replace(super().compute_step(anchors, rows, progress), value=value)


class Dclw(_Views):
    """DCL with weighted positives: less weight for pairs that are already similar (DCL, section 3).

    The weight is 2 - exp(positive / sigma) divided by its mean in the batch, and is not differentiated.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": DclwSettings}
    settings: DclwSettings

    def compute_step(self, anchors: Anchors, rows: Rows, progress: Progress) -> Step:
        tau = self.settings.tau
        likeness = (anchors.positive / self.settings.sigma).softmax(1) * anchors.positive.shape[1]
        weight = 2.0 - likeness
        # log_sum is relative to the positive, so only the weight's excess over 1 is added.
        value = anchors.weighted(anchors.log_sum + (1.0 - weight) * anchors.positive / tau).mean()
        negative_weight = torch.full_like(weight, 1.0 / tau) * self.share(anchors)
        return Step(value, negative_weight, weight * negative_weight)
