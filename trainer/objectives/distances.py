"""Similarity by distance: the negative Euclidean distance of features of any norm, in place of the cosine."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from .base import FeaturesError, Settings, row_norms
from .contrastive import Contrastive
from .pairs import Block, Pairs


class Distances(Pairs):
    """The similarities -|x - y| of a global batch.

    Between samples |x - y|² = |x|² + |y|² - 2 x·y, after subtracting the features' mean: far from the origin that
    difference would lose its digits. A sample's own two features may be very close, so |x - y| is computed directly.
    """

    def __init__(self, features: Tensor, own: slice, *, across: bool, budget: int) -> None:
        super().__init__(features - features.mean((0, 1)), own, across=across, budget=budget)
        self._squares = self.table.square().sum(1)

    @cached_property
    def positives(self) -> Tensor:
        distances: Tensor = torch.linalg.vector_norm(self.features[0] - self.features[1], dim=1)
        return -distances

    def fill(self, similarities: Tensor, rows: slice, block: Block) -> None:
        of_columns, columns = self._squares[block.columns], self.table[block.columns]
        torch.addmm(of_columns, self.table[rows], columns.T, alpha=-2, out=similarities)
        for piece_rows, piece in self.split(rows, similarities):
            piece.add_(self._squares[piece_rows].unsqueeze(1)).clamp_(min=0).sqrt_().neg_()

    def gradients(self, weigh: Callable[[Tensor, slice, Block], None], in_positives: Tensor) -> Tensor:
        """As for products. The gradient of -|x - y| in x is (y - x) / |x - y|, and 0 where x = y."""
        sums = torch.zeros_like(self.features[:, self.own, :1])

        def over_distances(similarities: Tensor, rows: slice, block: Block) -> None:
            distances = similarities.neg()
            weigh(similarities, rows, block)
            _divide(similarities, distances)
            half = self.blocks.index(block)
            sums[half, block.local(rows)] += similarities.sum(1, keepdim=True)
            if self.mirrored:
                sums[1] += similarities.sum(0).unsqueeze(1)

        of_candidates = super().gradients(over_distances, torch.zeros_like(in_positives))
        toward_second = self.features[1, self.own] - self.features[0, self.own]
        toward_second *= _divide(in_positives.sum(0), -self.positives)[self.own].unsqueeze(1)
        of_positives = torch.stack([toward_second, -toward_second])
        return of_candidates.addcmul_(sums, self.features[:, self.own], value=-1).add_(of_positives)


def _divide(weights: Tensor, distances: Tensor) -> Tensor:
    """Divide in place; 0 where the distance is 0."""
    return weights.div_(distances).masked_fill_(distances == 0, 0.0)


class SimilaritySettings(Settings, frozen=True):
    """Settings of an objective that uses cosines or distances."""

    similarity: Literal["cos", "distance"] = "cos"
    """The cosine of unit-norm features, or the negative Euclidean distance of raw features, for which tau is 0.5 unless
    given. DeCL section 4.1 and table 1."""

    @model_validator(mode="before")
    @classmethod
    def _tau_of_distances(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"tau": 0.5} | given if given.get("similarity") == "distance" else given


class CosineOrDistance(Contrastive):
    """An objective that uses cosines or distances, by its setting `similarity`."""

    def __init__(self, mode: str, settings: SimilaritySettings, **initial: float) -> None:
        super().__init__(mode, settings, **initial)
        if settings.similarity == "distance":
            self.pairs_of, self.unit_norm = Distances, False

    def check_frame(self, keys: bool, local: int) -> None:
        super().check_frame(keys, local)
        if (keys or local) and not self.unit_norm:
            raise ValueError(f"{self._named}: similarity = 'distance' takes neither keys nor local views; use 'cos'")

    def check_values(self, features: Mapping[str, Tensor], *, first_step: bool) -> None:
        super().check_values(features, first_step=first_step)
        if first_step and not self.unit_norm and all(bool(row_norms(rows)[1].all()) for rows in features.values()):
            raise FeaturesError(
                "features: every row has norm 1, but similarity = 'distance' takes features as they are, not "
                "normalised; pass them without torch.nn.functional.normalize, or set similarity = 'cos'"
            )
