"""The similarities of a batch, and the products that turn weights on them into gradients: the b·b·d part of a step.

All rows of features stand in one table [2b, d], those of `first` above those of `second`; row i and row b + i are one
sample's. An anchor has the number of its row. What a rank's own anchors see, and what pulls at its own features, needs
the blocks [own rows, candidates] alone.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

EXCLUDED = -1e30
"""Similarity of a pair that is no candidate. Finite, where -inf would make exp(x)·x a NaN; over any temperature below
1e28 its exponential is 0."""

PIECE = {"cpu": 2**19, "cuda": 2**24}
"""Pairs that pass through elementwise work at a time: on a CPU 2 MiB of float32, which stays in the caches; on a GPU
what bounds the temporaries."""


class Block(NamedTuple):
    """A part of the table's similarities with itself."""

    rows: slice
    columns: slice

    def local(self, rows: slice) -> slice:
        """The table's `rows` counted from the block's first."""
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)


class Pairs:
    """The similarities that a rank needs of a global batch.

    Where all blocks fit `budget` bytes they are computed once and kept; else chunks of rows within the budget are
    computed for each visit anew.
    """

    def __init__(self, features: Tensor, own: slice, *, across: bool, budget: int) -> None:
        """features: [2, b, d], float32 or float64, of the global batch; own: the samples that this rank holds.

        across: a row's candidates are the rows of the other half (image against text) rather than all.
        """
        self.features, self.own, self.batch = features, own, features.shape[1]
        self.table = features.flatten(0, 1)
        halves = [slice(start, start + self.batch) for start in (0, self.batch)]
        owned = [slice(half.start + own.start, half.start + own.stop) for half in halves]
        everything = slice(0, 2 * self.batch)
        self.blocks = [
            Block(rows, other if across else everything) for rows, other in zip(owned, halves[::-1], strict=True)
        ]
        self.mirrored = across and owned == halves
        """The one block holds the second half's similarities as well, in its columns."""
        if self.mirrored:
            del self.blocks[1]
        rows, columns = own.stop - own.start, self.blocks[0].columns.stop - self.blocks[0].columns.start
        row_bytes = columns * features.element_size()
        self._keep = len(self.blocks) * rows * row_bytes <= budget
        self._chunk_rows = rows if self._keep else min(rows, max(1, budget // row_bytes))
        self._kept: dict[int, Tensor] = {}
        # One buffer for all chunks: the next is computed while the last is still in use.
        self._chunk = features.new_empty((0 if self._keep else self._chunk_rows, columns))

    def visit(self, block: Block) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of the block: the table's rows and [rows, columns], EXCLUDED where a sample meets itself.

        A chunk holds until the next one. The caller may write over it at the block's last visit.
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
            torch.mm(self.table[rows], self.table[block.columns].T, out=similarities)
            self.fill_own(similarities, rows, block, EXCLUDED)
            yield rows, similarities

    def fill_own(self, similarities: Tensor, rows: slice, block: Block, value: float) -> None:
        """Write `value` where a row meets rows of its own sample; similarities: the block's at `rows`."""
        for half in (0, self.batch):
            if block.columns.start <= half < block.columns.stop:
                similarities.diagonal(rows.start % self.batch + half - block.columns.start).fill_(value)

    def pieces(self, block: Block) -> Iterator[tuple[slice, Tensor]]:
        """As `visit`, in pieces that suit elementwise work."""
        for rows, similarities in self.visit(block):
            yield from split(rows, similarities)

    def gradients(self, weigh: Callable[[Tensor, slice, Block], None], in_positives: Tensor) -> Tensor:
        """Gradients [2, n, d] in this rank's features of what has the gradient W in the similarities.

        weigh(similarities, rows, block) writes W over a piece of similarities, 0 where they are EXCLUDED; in_positives
        [b] is W of each sample's positive. Visits every block for the last time.
        """
        gradients = torch.empty_like(self.features[:, self.own])
        for half, block in enumerate(self.blocks):
            for rows, weights in self.visit(block):
                for piece_rows, piece in split(rows, weights):
                    weigh(piece, piece_rows, block)
                torch.mm(weights, self.table[block.columns], out=gradients[half, block.local(rows)])
                if self.mirrored:  # what is there before the first chunk is not read
                    gradients[1].addmm_(weights.T, self.table[rows], beta=int(rows.start > block.rows.start))
        # A pair's positive similarity is one number, whichever of the two is the anchor.
        for half in (0, 1):
            gradients[half].addcmul_(in_positives[self.own].unsqueeze(1), self.features[1 - half, self.own])
        return gradients


def split(rows: slice, similarities: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Views of a chunk, a few rows each."""
    height = max(1, PIECE.get(similarities.device.type, PIECE["cuda"]) // similarities.shape[1])
    for start in range(0, len(similarities), height):
        piece = similarities[start : start + height]
        yield slice(rows.start + start, rows.start + start + len(piece)), piece
