"""AUC-CL: a contrastive loss that maximises the area under the ROC curve (Sharma et al., ICLR 2024)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .base import Objective, Outcome, Progress, Settings, count_visit, working_dtype
from .closed_form import attach_gradients
from .gathering import Ranks
from .pairs import Block, Pairs
from .precision import full_precision
from .temperatures import scalar_parameter


class AucClSettings(Settings, frozen=True):
    """Settings of AUC-CL."""

    a: float = Field(default=1.0, ge=-1.0, le=1.0)
    """Similarity that positives are drawn to, in [-1, 1]; fixed. AUC-CL eq 8."""
    b: float = Field(default=0.0, ge=-1.0, le=1.0)
    """First value of the learned similarity that negatives are drawn to, in [-1, 1]. AUC-CL eq 8."""
    alpha: float = Field(default=0.5, ge=0.0)
    """Margin, 0 or more; 0.1 to 1 train and 0 collapses. AUC-CL table 11."""


class AucCl(Objective):
    """Squared AUC loss of two views, [b, b] similarities between them; no temperature, no state per sample.

    Value: (1/b) sum_i of (sim_ii - a)² + sum_{j≠i} (sim_ij - b)² + 2 alpha (1 - sim_ii + sum_{j≠i} sim_ij) - alpha².
    AUC-CL eq 8. `b` is learned.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": AucClSettings}

    settings: AucClSettings

    def __init__(self, mode: str, settings: AucClSettings) -> None:
        super().__init__()
        self.settings, self.fields = settings, {}
        self.b = scalar_parameter(settings.b)

    def forward(self, first: Tensor, second: Tensor, state: Mapping[str, Tensor], progress: Progress) -> Outcome:
        """See Objective. Computed in the features' dtype, at least float32."""
        ranks, dtype = Ranks.of_this_process(), working_dtype(first, second)
        self.check(first, second, ranks)
        with torch.no_grad(), full_precision(first.device.type):
            self.project()
            features = ranks.gather(torch.stack([first, second])).to(dtype)
            own = ranks.own(len(first))
            pairs = Pairs(features, own, across=True, budget=self.settings.similarity_budget)
            positive, count = (features[0] * features[1]).sum(1), features.shape[1]
            squares, differences, peak = ranks.gather(self._row_sums(pairs))
            value, in_b = self._value(positive, squares, differences)
            gradients = pairs.gradients(
                lambda similarities, rows, block: similarities.copy_(
                    self._differences(pairs, similarities, rows, block).mul_(2 / count)
                )
            ).mul_(ranks.world)
            pull = (ranks.world * self._positive_gradient(positive)[own] / count).unsqueeze(1)
            gradients[0].addcmul_(pull, features[1, own])
            gradients[1].addcmul_(pull, features[0, own])
        loss = attach_gradients(value, [first, second, self.b], [*gradients.unbind(), in_b])
        new_state = {"visits": count_visit(state["visits"])} if "visits" in state else {}
        found = (positive > peak).to(dtype).mean()
        return Outcome(loss, new_state, {"b": self.b.detach().clone(), "sample/retrieval_accuracy": found})

    def project(self) -> None:
        self.b.clamp_(-1.0, 1.0)

    def _value(self, positive: Tensor, squares: Tensor, differences: Tensor) -> tuple[Tensor, Tensor]:
        """Of the global batch: the loss and its derivative in b."""
        alpha, others = self.settings.alpha, len(positive) - 1
        of_positives = (positive - self.settings.a) ** 2 + 2 * alpha * (1 - positive) - alpha**2
        value = (of_positives + squares).mean() + others * (2 * alpha * self.b - alpha**2)
        return value.to(positive.dtype), -2 * (differences.mean() - others * alpha)

    def _positive_gradient(self, positive: Tensor) -> Tensor:
        return 2 * (positive - self.settings.a - self.settings.alpha)

    def _differences(self, pairs: Pairs, similarities: Tensor, rows: slice, block: Block) -> Tensor:
        """sim - c of negatives, 0 of positives: with c = b - alpha, (sim - b)² + 2 alpha sim is (sim - c)² + 2 alpha b
        - alpha²."""
        differences = similarities - (self.b - self.settings.alpha).to(similarities.dtype)
        pairs.fill_own(differences, rows, block, 0.0)
        return differences

    def _row_sums(self, pairs: Pairs) -> Tensor:
        """[3, n] of own rows: sum of squared differences, sum of differences, largest similarity of a negative."""
        parts = []
        for rows, similarities in pairs.pieces(pairs.blocks[0]):
            differences = self._differences(pairs, similarities, rows, pairs.blocks[0])
            parts.append(torch.stack([differences.square().sum(1), differences.sum(1), similarities.amax(1)]))
        return torch.cat(parts, dim=1)
