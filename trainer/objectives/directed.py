"""Similarities of a step with a momentum encoder or local views: anchors and their candidates are different rows.

A direction is an anchor view v and a target a, v != a: a loss of its own. Targets are the keys of both global views, or
without a momentum encoder the global views themselves. Keys are constants; global views as targets are differentiated.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .gathering import GlobalBatch
from .pairs import Block, Pairs, split


class Directed(Pairs):
    """The similarities of this rank's anchors with the targets of the global batch.

    `directions` lists (v, a) by anchor view. If candidates are one target's rows, every direction has a block; if they
    are both targets' rows, every view has a block, and its directions differ only in their positives.
    """

    def __init__(
        self, views: Tensor, targets: Tensor, ranks: GlobalBatch, *, across: bool, constant: bool, budget: int
    ) -> None:
        """views: [v, n, d], this rank's first, second and local views; targets: [2, b, d], of the global batch.

        across: an anchor's candidates are the rows of its target instead of both; constant: targets have no gradient.
        """
        samples, (count, rows) = targets.shape[1], views.shape[:2]
        self.features, self.own, self.batch, self.budget = targets, ranks.own(rows), samples, budget
        self.views, self.table = views, targets.flatten(0, 1)
        self.directions = [(view, target) for view in range(count) for target in (0, 1) if view != target]
        self._ranks, self._constant, self._across = ranks, constant, across
        if across:
            compared = [(view, slice(target * samples, (target + 1) * samples)) for view, target in self.directions]
        else:
            compared = [(view, slice(0, 2 * samples)) for view in range(count)]
        self._view_of_block = [view for view, _ in compared]
        self.anchors = torch.cat([views[view] for view in self._view_of_block])
        self.blocks = [
            Block(slice(number * rows, (number + 1) * rows), columns) for number, (_, columns) in enumerate(compared)
        ]
        self.mirrored = False
        self._divide_budget()

    @property
    def anchor_sets(self) -> int:
        return len(self.blocks)

    def exchange(self, ranks: GlobalBatch, own: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        positives = torch.stack([(self.views[v] * self.features[a, self.own]).sum(1) for v, a in self.directions])
        sent = [positives, *own]
        positives, *whole = torch.split(ranks.gather(torch.cat(sent)), [len(values) for values in sent])
        return positives, whole

    def of_directions(self, of_blocks: Tensor) -> Tensor:
        return of_blocks if self._across else torch.stack([of_blocks[view] for view, _ in self.directions])

    def summed_by_block(self, of_directions: Tensor) -> Tensor:
        """Sum values over the directions of each block: [directions, …] -> [blocks, …]."""
        if self._across:
            return of_directions
        sums = of_directions.new_zeros((len(self.blocks), *of_directions.shape[1:]))
        for values, (view, _) in zip(of_directions, self.directions, strict=True):
            sums[view] += values
        return sums

    def gradients(self, grad_weights: Callable[[Tensor, slice, Block], None], in_positives: Tensor) -> Tensor:
        """As Pairs', [v, n, d], of this rank's views; in_positives: [directions, b].

        If targets are differentiated, the ranks sum their contributions to the targets, [2, b, d]: fewer numbers than
        all local views' features.
        """
        gradients, in_targets = torch.zeros_like(self.views), torch.zeros_like(self.table)
        for view, block in zip(self._view_of_block, self.blocks, strict=True):
            for rows, weights in self.visit(block):
                for piece_rows, piece in split(rows, weights):
                    grad_weights(piece, piece_rows, block)
                gradients[view, block.local(rows)].addmm_(weights, self.table[block.columns])
                if not self._constant:
                    in_targets[block.columns].addmm_(weights.T, self.anchors[rows])
        in_targets = in_targets.view_as(self.features)
        of_own = in_positives[:, self.own].unsqueeze(2)
        for (view, target), in_positive in zip(self.directions, of_own, strict=True):
            gradients[view].addcmul_(in_positive, self.features[target, self.own])
            if not self._constant:
                in_targets[target, self.own].addcmul_(in_positive, self.views[view])
        if not self._constant:
            gradients[:2] += self._ranks.sum(in_targets)[:, self.own]
        return gradients
