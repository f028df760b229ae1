"""AUC-CL: a contrastive loss that maximises the area under the ROC curve (Sharma et al., ICLR 2024)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .base import Computed, Objective, Progress, Settings, scalar_parameter
from .gathering import GlobalBatch
from .pairs import Block, Pairs


class AucClSettings(Settings, frozen=True):
    """Settings of AUC-CL."""

    a: float = Field(default=1.0, ge=-1.0, le=1.0)
    """Target similarity of positives, in [-1, 1]; fixed. AUC-CL eq 8."""
    b: float = Field(default=0.0, ge=-1.0, le=1.0)
    """Initial value of the learned target similarity of negatives, in [-1, 1]. AUC-CL eq 8."""
    alpha: float = Field(default=0.5, ge=0.0)
    """Margin, 0 or more; 0.1 to 1 train, 0 collapses. AUC-CL table 11."""


class AucCl(Objective):
    """Squared AUC loss of two views, from their [b, b] similarities; no temperature, no per-sample state.

    Value: (1/b) sum_i of (sim_ii - a)² + sum_{j≠i} (sim_ij - b)² + 2 alpha (1 - sim_ii + sum_{j≠i} sim_ij) - alpha².
    AUC-CL eq 8. `b` is learned.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": AucClSettings}

    settings: AucClSettings

    def __init__(self, mode: str, settings: AucClSettings) -> None:
        super().__init__(mode, settings)
        self.across = True
        self.b = scalar_parameter(settings.b)

    def compute(self, pairs: Pairs, batch: GlobalBatch, state: Mapping[str, Tensor], progress: Progress) -> Computed:
        b, positive = self.b.to(pairs.features.dtype), (pairs.features[0] * pairs.features[1]).sum(1)
        squares, differences, peak = batch.gather(_row_sums(pairs, b))

        def feature_gradients() -> Tensor:
            in_positives = 2 * (positive - self.settings.a - self.settings.alpha)
            gradients = pairs.gradients(lambda *piece: self._grad_weights(pairs, b, *piece), in_positives)
            return gradients.mul_(batch.world / len(positive))

        found = (positive > peak).to(positive.dtype).mean()
        return Computed(
            value=self._value(b, positive, squares, differences),
            feature_gradients=feature_gradients,
            parameter_gradients=[-2 * differences.mean()],
            metrics={"b": self.b.detach().clone(), "sample/retrieval_accuracy": found},
        )

    def project(self) -> None:
        self.b.clamp_(-1.0, 1.0)

    def _value(self, b: Tensor, positive: Tensor, squares: Tensor, differences: Tensor) -> Tensor:
        """Return the loss. squares, differences: sums over each row's negatives [b] of (sim - b)² and of sim - b."""
        alpha, others = self.settings.alpha, len(positive) - 1
        of_positives = (positive - self.settings.a).square() + 2 * alpha * (1 - positive) - alpha**2
        return (of_positives + squares + 2 * alpha * differences).mean() + 2 * alpha * others * b

    def _grad_weights(self, pairs: Pairs, b: Tensor, similarities: Tensor, rows: slice, block: Block) -> None:
        """Write b times the loss's gradient with respect to a piece of similarities over it, 0 at positives."""
        similarities.sub_(b - self.settings.alpha).mul_(2)
        pairs.fill_own(similarities, rows, block, 0.0)


def _row_sums(pairs: Pairs, b: Tensor) -> Tensor:
    """Return [3, n], sums over the negatives of own rows: of (sim - b)², of sim - b, and the largest sim."""
    block = pairs.blocks[0]
    sums = pairs.table.new_empty((3, block.rows.stop - block.rows.start))
    for rows, similarities in pairs.pieces(block):
        differences = similarities - b
        pairs.fill_own(differences, rows, block, 0.0)
        of_rows = (differences.square().sum(1), differences.sum(1), similarities.amax(1))
        sums[:, block.local(rows)] = torch.stack(of_rows)
    return sums
