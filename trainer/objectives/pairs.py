"""The similarities of a batch, and the matrix products that turn their gradients into the features'; O(b·b·d).

All features form one table [2b, d]: rows of `first`, then rows of `second`; row i and row b + i belong to one sample.
An anchor is identified by its row. A rank's own anchors and its own features' gradients need only the blocks
[own rows, candidates].
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .gathering import GlobalBatch

EXCLUDED = -1e30
"""Similarity of a pair that is not a candidate. Finite, because -inf would make exp(x)·x a NaN; for any temperature
below 1e28 its exponential is 0."""

PIECE = {"cpu": 2**19, "cuda": 2**22}
"""Pairs per elementwise operation: 2 MiB of float32 on a CPU and 16 MiB on a GPU, which stay in the caches with their
temporaries."""


class Block(NamedTuple):
    """A block of the similarities of `anchors`, its rows, with `table`, its columns."""

    rows: slice
    columns: slice

    def local(self, rows: slice) -> slice:
        """Return `rows` relative to the block's first row."""
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)


class Pairs:
    """The similarities that a rank needs of a global batch.

    If all blocks fit into `budget` bytes they are computed once and kept. Otherwise each visit recomputes chunks of
    rows within the budget.
    """

    def __init__(self, features: Tensor, own: slice, *, across: bool, budget: int) -> None:
        """features: [2, b, d], float32 or float64, of the global batch; own: the slice of this rank's samples.

        across: a row's candidates are the rows of the other half (image against text) instead of all rows.
        """
        self.features, self.own, self.batch, self.budget = features, own, features.shape[1], budget
        self.table = self.anchors = features.flatten(0, 1)
        halves = [slice(start, start + self.batch) for start in (0, self.batch)]
        owned = [slice(half.start + own.start, half.start + own.stop) for half in halves]
        everything = slice(0, 2 * self.batch)
        self.blocks = [
            Block(rows, other if across else everything) for rows, other in zip(owned, halves[::-1], strict=True)
        ]
        self.mirrored = across and owned == halves
        """The only block also holds the second half's similarities, in its columns."""
        if self.mirrored:
            del self.blocks[1]
        self._divide_budget()

    def _divide_budget(self) -> None:
        """Choose between kept blocks and recomputed chunks."""
        rows, columns = self.own.stop - self.own.start, self.blocks[0].columns.stop - self.blocks[0].columns.start
        row_bytes = columns * self.features.element_size()
        self._keep = len(self.blocks) * rows * row_bytes <= self.budget
        self._chunk_rows = rows if self._keep else min(rows, max(1, self.budget // row_bytes))
        self._kept: dict[int, Tensor] = {}

    @cached_property
    def positives(self) -> Tensor:
        """Similarity of each sample's own two features, [b]."""
        return (self.features[0] * self.features[1]).sum(1)

    @cached_property
    def _chunk(self) -> Tensor:
        """One buffer for all chunks: a new one would be allocated while the previous chunk is still in use."""
        columns = self.blocks[0].columns
        return self.features.new_empty((0 if self._keep else self._chunk_rows, columns.stop - columns.start))

    @property
    def anchor_sets(self) -> int:
        """Sets of anchors, each with one anchor of every sample."""
        return 2

    @property
    def negatives(self) -> int:
        """Candidates per anchor."""
        columns = self.blocks[0].columns
        halves: int = (columns.stop - columns.start) // self.batch
        return halves * (self.batch - 1)

    def exchange(self, ranks: GlobalBatch, own: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the similarities of all positives, [b] or [directions, b], and the global batch's values, [k, b] each.

        own: values of this rank's anchors or samples, [k, n] each. This is the second of a step's two exchanges.
        """
        whole = torch.split(ranks.gather(torch.cat(list(own))), [len(values) for values in own])
        return self.positives, list(whole)

    def of_directions(self, of_blocks: Tensor) -> Tensor:
        """Return values of each set of anchors, [anchor_sets, b], once for each of an anchor's positives."""
        return of_blocks

    def visit(self, block: Block) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of the block: the anchors' rows and [rows, columns], EXCLUDED where a sample meets itself.

        A chunk is valid until the next one. On the block's last visit the caller may overwrite it.
        """
        for start in range(block.rows.start, block.rows.stop, self._chunk_rows):
            rows = slice(start, min(start + self._chunk_rows, block.rows.stop))
            if start in self._kept:
                yield rows, self._kept[start]
                continue
            similarities = self._chunk[: rows.stop - rows.start]
            if self._keep:
                similarities = self._kept[start] = similarities.new_empty(
                    (rows.stop - rows.start, self._chunk.shape[1])
                )
            self.fill(similarities, rows, block)
            self.fill_own(similarities, rows, block, EXCLUDED)
            yield rows, similarities

    def fill(self, similarities: Tensor, rows: slice, block: Block) -> None:
        """Write the block's similarities at `rows`."""
        torch.mm(self.anchors[rows], self.table[block.columns].T, out=similarities)

    def fill_own(self, similarities: Tensor, rows: slice, block: Block, value: float) -> None:
        """Write `value` where a row meets rows of its own sample; similarities: the block's at `rows`."""
        first = self.own.start + rows.start - block.rows.start
        for half in (0, self.batch):
            if block.columns.start <= half < block.columns.stop:
                similarities.diagonal(first + half - block.columns.start).fill_(value)

    def pieces(self, block: Block) -> Iterator[tuple[slice, Tensor]]:
        """As `visit`, in smaller pieces for elementwise operations."""
        for rows, similarities in self.visit(block):
            yield from split(rows, similarities)

    def gradients(self, grad_weights: Callable[[Tensor, slice, Block], None], in_positives: Tensor) -> Tensor:
        """Return gradients [2, n, d] of this rank's features, given the gradient W of the similarities.

        grad_weights(similarities, rows, block) overwrites a piece of similarities with W, 0 where they are EXCLUDED;
        in_positives [b] is W of each sample's positive. This is the last visit of every block.
        """
        gradients = torch.empty_like(self.features[:, self.own])
        for half, block in enumerate(self.blocks):
            for rows, weights in self.visit(block):
                for piece_rows, piece in split(rows, weights):
                    grad_weights(piece, piece_rows, block)
                torch.mm(weights, self.table[block.columns], out=gradients[half, block.local(rows)])
                if self.mirrored:  # beta = 0 for the first chunk: the buffer is uninitialised
                    gradients[1].addmm_(weights.T, self.table[rows], beta=int(rows.start > block.rows.start))
        # A pair has one positive similarity, whichever of the two is the anchor.
        for half in (0, 1):
            gradients[half].addcmul_(in_positives[self.own].unsqueeze(1), self.features[1 - half, self.own])
        return gradients


def split(rows: slice, similarities: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield views of a chunk, a few rows each."""
    height = max(1, PIECE.get(similarities.device.type, PIECE["cuda"]) // similarities.shape[1])
    for start in range(0, len(similarities), height):
        piece = similarities[start : start + height]
        yield slice(rows.start + start, rows.start + start + len(piece)), piece
