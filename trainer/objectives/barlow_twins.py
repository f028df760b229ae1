"""Barlow Twins: columns that agree across views and are uncorrelated with each other (Zbontar et al., ICML 2021)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .base import Computed, Objective, Progress, Settings
from .columns import centred, off_diagonal_products
from .gathering import GlobalBatch
from .pairs import Pairs


class BarlowTwinsSettings(Settings, frozen=True):
    redundancy: float = Field(default=0.0051, ge=0.0)
    """Weight of the correlations of different columns, 0 or more; 0.0051 in the authors' code, 0.005 in the paper."""
    eps: float = Field(default=1e-5, gt=0.0)
    """Added to a column's variance, above 0; as in batch normalisation."""


class BarlowTwins(Objective):
    """Redundancy reduction of two views; features of any norm, no per-sample state.

    With C [d, d] the correlations of the first view's columns with the second's over the global batch, value:
    sum_k (1 - C_kk)² + redundancy · sum of C_kl² over k != l. Barlow Twins algorithm 1, its variances over b and with
    eps as in the authors' code.
    """

    settings_of_mode: ClassVar[dict[str, type[Settings]]] = {"unimodal": BarlowTwinsSettings}

    settings: BarlowTwinsSettings

    unit_norm = False

    def compute(self, pairs: Pairs, batch: GlobalBatch, state: Mapping[str, Tensor], progress: Progress) -> Computed:
        samples, redundancy, views = pairs.batch, self.settings.redundancy, centred(pairs.features)
        deviations = (views.square().mean(1, keepdim=True) + self.settings.eps).sqrt()
        first, second = views.div_(deviations)
        own, diagonal = views[:, pairs.own], (first * second).mean(0)

        # Sums of C_kl² and products with C_kl over l != k, for each view's columns k, in one pass.
        squares, products = torch.zeros_like(deviations), torch.empty_like(own)
        products[1] = 0.0
        for columns, c in off_diagonal_products(first, second, self.settings.budget_on(first.device)):
            c.div_(samples)
            squares[0, 0, columns] = torch.linalg.vector_norm(c, dim=1).square()
            squares[1, 0] += torch.linalg.vector_norm(c, dim=0).square()
            products[0, :, columns] = own[1] @ c.T
            products[1].addmm_(own[0, :, columns], c)

        def feature_gradients() -> Tensor:
            pull = 2 * (diagonal - 1)
            in_normalised = 2 * redundancy * products + pull * own.flip(0)
            # Moving a feature also moves its column's mean and deviation; in_normalised has mean 0 over the batch.
            along = 2 * redundancy * squares + pull * diagonal
            gradients: Tensor = (in_normalised - along * own) * batch.world / (samples * deviations)
            return gradients

        return Computed(
            value=(1 - diagonal).square().sum() + redundancy * squares[0].sum(),
            feature_gradients=feature_gradients,
            metrics={"correlation_mean": diagonal.mean()},
        )
