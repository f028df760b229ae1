"""AUC-CL: a contrastive loss that maximises the area under the ROC curve (Sharma et al., ICLR 2024)."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from .base import Computed, Objective, Progress, Settings, scalar_parameter
from .directed import Directed
from .gathering import GlobalBatch
from .pairs import Block, Pairs


class AucClSettings(Settings, frozen=True):
    """Settings of AUC-CL. The defaults are eq 8; the authors' code has another form (docs/method.md)."""

    a: float = Field(default=1.0, gt=0.0, le=20.0)
    """Target similarity of positives, in (0, 20]; fixed. AUC-CL eq 8; 10 in the authors' code."""
    b: float = Field(default=0.0, ge=-1.0, le=1.0)
    """Target similarity of negatives, in [-1, 1]; the initial value if it is learned. AUC-CL eq 8."""
    learn_b: bool = True
    """Learn b, as in eq 8; the authors' ImageNet runs keep it at 0."""
    alpha: float = Field(default=0.5, ge=0.0)
    """Margin, 0 or more; 0.1 to 1 train, 0 collapses. AUC-CL table 11."""
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
    AUC-CL eq 8. With keys: the sum over both directions. With local views: the mean over directions, doubled with keys.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": AucClSettings}

    keys = "optional"
    has_local = True
    settings: AucClSettings

    def __init__(self, mode: str, settings: AucClSettings) -> None:
        super().__init__(mode, settings)
        self.across = settings.views == "across"
        b = scalar_parameter(settings.b)
        if settings.learn_b:
            self.b = b
        else:
            self.register_buffer("b", b.detach(), persistent=False)
        self._slope = 1.0 if settings.similarity == "cos" else 0.5
        """Derivative of the similarity by the cosine."""

    def check_frame(self, keys: bool, local: int) -> None:
        super().check_frame(keys, local)
        if self.settings.views == "all" and (keys or local):
            raise ValueError("objective 'auc_cl': views = 'all' takes neither keys nor local views; use 'across'")

    def compute(self, pairs: Pairs, batch: GlobalBatch, state: Mapping[str, Tensor], progress: Progress) -> Computed:
        settings, b = self.settings, self.b.to(pairs.features.dtype)
        cosines, (sums,) = pairs.exchange(batch, [self._own_sums(pairs, b).flatten(0, 1)])
        positive = self._similarity(cosines)
        # Each [1 or 2, b], of the anchors of one view or of both, or [directions, b].
        squares, differences, peak = sums.chunk(3)
        weight = 1.0 if settings.negatives == "sum" else settings.p / (pairs.batch * (1 if self.across else 2))

        def weigh(similarities: Tensor, rows: slice, block: Block) -> None:
            # If both ends of a pair are anchors, it counts twice in a mean over twice as many.
            excess = torch.sub(self._similarity(similarities), b - settings.alpha, out=similarities)
            excess.mul_(2 * weight * self._slope)
            pairs.fill_own(similarities, rows, block, 0.0)

        def feature_gradients() -> Tensor:
            in_positives = 2 * self._slope * (positive - settings.a - settings.alpha)
            return pairs.gradients(weigh, in_positives).mul_(batch.world / positive.numel())

        of_positives = (positive - settings.a).square() + 2 * settings.alpha * (1 - positive) - settings.alpha**2
        of_negatives = squares.mean() + 2 * settings.alpha * (differences.mean() + pairs.negatives * b)
        return Computed(
            value=of_positives.mean() + weight * of_negatives,
            feature_gradients=feature_gradients,
            parameter_gradients=[-2 * weight * differences.mean()] if settings.learn_b else [],
            metrics={
                "b": self.b.detach().clone(),
                "sample/retrieval_accuracy": (positive > peak).to(positive.dtype).mean(),
            },
        )

    def project(self) -> None:
        self.b.clamp_(-1.0, 1.0)

    def _similarity(self, cosines: Tensor) -> Tensor:
        return cosines if self.settings.similarity == "cos" else (1 + cosines) / 2

    def _own_sums(self, pairs: Pairs, b: Tensor) -> Tensor:
        """Return [3, 1 or 2, n] or [3, directions, n], over own anchors' negatives: the sums of (s - b)² and of s - b,
        and the largest s.
        """
        both = isinstance(pairs, Directed) or not self.across
        blocks = pairs.blocks if both else pairs.blocks[:1]
        sums = pairs.table.new_empty((3, len(blocks), pairs.own.stop - pairs.own.start))
        for view, block in enumerate(blocks):
            for rows, cosines in pairs.pieces(block):
                similarities = self._similarity(cosines)
                differences = similarities - b
                pairs.fill_own(differences, rows, block, 0.0)
                of_rows = (differences.square().sum(1), differences.sum(1), similarities.amax(1))
                sums[:, view, block.local(rows)] = torch.stack(of_rows)
        return sums
