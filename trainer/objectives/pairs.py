"""The similarities of a batch, and the matrix products that turn their gradients into the features'; O(b·b·d).

Similarities come in blocks, rows of anchors against rows of candidates, and a block in chunks and pieces, so that
memory does not grow with the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gathering import Frame, GlobalBatch

EXCLUDED = -1e30
"""Similarity of a pair that is not a candidate. Finite, because -inf would make exp(x)·x a NaN; for any temperature
below 1e28 its exponential is 0."""

PIECE = {"cpu": 2**19, "cuda": 2**22}
"""Pairs per elementwise operation: 2 MiB of float32 on a CPU and 16 MiB on a GPU, which stay in the caches."""


class Block(NamedTuple):
    """A block of the similarities of `anchors`, its rows, with `table`, its columns."""

    rows: slice
    columns: slice

    def local(self, rows: slice) -> slice:
        """Return `rows` relative to the block's first row."""
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)


class Pairs:
    """The similarities that a rank needs of a global batch whose candidates are all anchors too.

    All features form one table [2b, d]: rows of `first`, then rows of `second`; row i and row b + i belong to one
    sample, and an anchor is identified by its row. A rank's own anchors and its own features' gradients need only the
    blocks [own rows, candidates]. If all blocks fit into `budget` bytes they are computed once and kept. Otherwise each
    visit recomputes chunks of rows within the budget.
    """

    mutual = True
    """Whether a pair's two rows are both anchors, so that its gradient has a part from each."""

    tf32 = False
    """Whether a GPU multiplies these float32 features in TF32, which has 11 of float32's 24 bits."""

    compiled = False
    """Whether elementwise operations are compiled; they then take whole chunks, as they leave nothing in between."""

    def __init__(self, features: Tensor, own: slice, *, across: bool, budget: int) -> None:
        """features: [2, b, d], float32 or float64, of the global batch; own: the slice of this rank's samples.

        across: a row's candidates are the rows of the other half (image against text) instead of all rows.
        """
        self.features, self.own, self.batch, self.budget = features, own, features.shape[1], budget
        self.table = self.anchors = features.flatten(0, 1)
        halves = [slice(start, start + self.batch) for start in (0, self.batch)]
        owned = [slice(half.start + own.start, half.start + own.stop) for half in halves]
        self.blocks = list(map(Block, owned, halves[::-1] if across else [slice(0, 2 * self.batch)] * 2))
        self.mirrored = across and owned == halves
        """The only block also holds the second half's similarities, in its columns."""
        if self.mirrored:
            del self.blocks[1]
        self.once = self.blocks[:1] if across else self.blocks
        """Blocks of all pairs; across, the second half's are the first's."""
        self.sets, self.directions = 2, [(0, 1), (1, 0)]
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
    def negatives(self) -> int:
        """Candidates per anchor."""
        columns = self.blocks[0].columns
        halves: int = (columns.stop - columns.start) // self.batch
        return halves * (self.batch - 1)

    def exchange(self, ranks: GlobalBatch, own: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the similarities of all positives, [directions, b], and the global batch's values, [k, b] each.

        own: values of this rank's anchors or samples, [k, n] each. This is the second of a step's two exchanges.
        """
        whole = torch.split(ranks.gather(torch.cat(list(own))), [len(values) for values in own])
        return self.positives.expand(2, -1), list(whole)

    def of_directions(self, of_sets: Tensor) -> Tensor:
        """Return values of each set of anchors, [sets, b], once for each of an anchor's positives."""
        return of_sets

    def of_sets(self, of_directions: Tensor) -> Tensor:
        """Return the sums of values over the directions of each set of anchors: [directions, b] -> [sets, b]."""
        return of_directions

    def of_rows(self, of_sets: Tensor) -> Tensor:
        """Return values of each set of anchors, [sets, b], for every row of `anchors`."""
        return of_sets.flatten()

    def visit(self, block: Block) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of the block: the anchors' rows and [rows, columns], EXCLUDED where a sample meets itself.

        A chunk is valid until the next one.
        """
        for start in range(block.rows.start, block.rows.stop, self._chunk_rows):
            rows = slice(start, min(start + self._chunk_rows, block.rows.stop))
            if start in self._kept:
                yield rows, self._kept[start]
                continue
            similarities = self._chunk[: rows.stop - rows.start]
            if self._keep:
                self._kept[start] = similarities = self._chunk.new_empty((rows.stop - rows.start, self._chunk.shape[1]))
            self.fill(similarities, rows, block)
            self.fill_own(similarities, rows, block, EXCLUDED)
            yield rows, similarities

    def fill(self, similarities: Tensor, rows: slice, block: Block) -> None:
        """Write the block's similarities at `rows`."""
        anchors, table = self.anchors[rows], self.table[block.columns]
        if self.tf32:
            # As three products, the small ones first: a number is 11 bits and the rest, and rest times rest is nothing.
            # Of 11 bits alone, CLIP's gradients erred by 2e-3 to 5e-2 at a temperature of 0.01.
            of_anchors, of_table = rounded(anchors.clone()), rounded(table.clone())
            anchors = torch.cat([anchors - of_anchors, of_anchors, of_anchors], 1)
            table = torch.cat([of_table, table - of_table, of_table], 1)
        self.add_product(anchors, table.T, similarities, beta=0)

    def add_product(self, left: Tensor, right: Tensor, sums: Tensor, beta: int = 1) -> None:
        """Multiply `sums` by beta, 0 if uninitialised, and add left @ right; the only products in TF32."""
        with ExitStack() as end:
            if self.tf32:
                set_until(end, torch.backends.cuda.matmul, "fp32_precision", "tf32")
                right = rounded(right.clone())
            sums.addmm_(left, right, beta=beta)

    def fill_own(self, similarities: Tensor, rows: slice, block: Block, value: float) -> None:
        """Write `value` where a row meets rows of its own sample; similarities: the block's at `rows`."""
        first = self.own.start + rows.start - block.rows.start
        for half in (0, self.batch):
            if block.columns.start <= half < block.columns.stop:
                similarities.diagonal(first + half - block.columns.start).fill_(value)

    def pieces(self, block: Block) -> Iterator[tuple[slice, Tensor]]:
        """As `visit`, in smaller pieces for elementwise operations."""
        for rows, similarities in self.visit(block):
            yield from self.split(rows, similarities)

    def split(self, rows: slice, similarities: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield views of a chunk, a few rows each."""
        pairs = similarities.numel() if self.compiled else PIECE.get(similarities.device.type, PIECE["cuda"])
        height = max(1, pairs // similarities.shape[1])
        for start in range(0, len(similarities), height):
            piece = similarities[start : start + height]
            yield slice(rows.start + start, rows.start + start + len(piece)), piece

    def fused(self, operations: Callable[..., Any]) -> Callable[..., Any]:
        """Return elementwise operations on tensors, compiled if these are to be."""
        return compile_for_each_shape(operations) if self.compiled else operations

    def weights(self, block: Block, weigh: Callable[[Tensor, slice, Block], None]) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of the block as `visit`, overwritten by `weigh`; a later visit computes similarities again."""
        for rows, similarities in self.visit(block):
            self._kept.pop(rows.start, None)
            for piece_rows, piece in self.split(rows, similarities):
                weigh(piece, piece_rows, block)
                if self.tf32:
                    self.fused(rounded)(piece)
            yield rows, similarities

    def gradients(self, weigh: Callable[[Tensor, slice, Block], None], in_positives: Tensor) -> Tensor:
        """Return gradients [2, n, d] of this rank's features, given the gradient W of the similarities.

        weigh(similarities, rows, block) overwrites a piece of similarities with W, 0 where they are EXCLUDED;
        in_positives [directions, b] is W of each direction's positives.
        """
        gradients = torch.empty_like(self.features[:, self.own])
        for half, block in enumerate(self.blocks):
            for rows, weights in self.weights(block, weigh):
                self.add_product(weights, self.table[block.columns], gradients[half, block.local(rows)], beta=0)
                if self.mirrored:
                    self.add_product(weights.T, self.table[rows], gradients[1], beta=int(rows.start > block.rows.start))
        # A pair has one positive similarity, whichever of the two is the anchor.
        of_own = in_positives.sum(0)[self.own].unsqueeze(1)
        for half in (0, 1):
            gradients[half].addcmul_(of_own, self.features[1 - half, self.own])
        return gradients


class Directed(Pairs):
    """The similarities of this rank's anchors with the targets of the global batch, which are other rows.

    A direction is an anchor view v and a target a, v != a: a loss of its own. Targets are the keys of both global
    views, or without a momentum encoder the global views themselves. Keys are constants; global views as targets are
    differentiated. If candidates are one target's rows, every direction has a block; if they are both targets' rows,
    every view has a block, and its directions differ only in their positives.
    """

    mutual = False

    def __init__(self, frame: Frame, *, across: bool, budget: int) -> None:
        """across: an anchor's candidates are the rows of its target instead of both."""
        self.views, self.features, self.own, self.budget = frame.views.detach(), frame.targets, frame.own, budget
        (count, rows), self.batch = self.views.shape[:2], self.features.shape[1]
        self.table = self.features.flatten(0, 1)
        self.directions = [(view, target) for view in range(count) for target in (0, 1) if view != target]
        self._ranks, self._constant, self._across = frame.ranks, frame.has_keys, across
        if across:
            compared = [(view, slice(a * self.batch, (a + 1) * self.batch)) for view, a in self.directions]
        else:
            compared = [(view, slice(0, 2 * self.batch)) for view in range(count)]
        self._view_of_block = [view for view, _ in compared]
        self.anchors = torch.cat([self.views[view] for view in self._view_of_block])
        self.once = self.blocks = [
            Block(slice(number * rows, (number + 1) * rows), columns) for number, (_, columns) in enumerate(compared)
        ]
        self.mirrored, self.sets = False, len(self.blocks)
        self._divide_budget()

    def exchange(self, ranks: GlobalBatch, own: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        positives = torch.stack([(self.views[v] * self.features[a, self.own]).sum(1) for v, a in self.directions])
        sent = [positives, *own]
        positives, *whole = torch.split(ranks.gather(torch.cat(sent)), [len(values) for values in sent])
        return positives, whole

    def of_directions(self, of_sets: Tensor) -> Tensor:
        return of_sets if self._across else torch.stack([of_sets[view] for view, _ in self.directions])

    def of_sets(self, of_directions: Tensor) -> Tensor:
        if self._across:
            return of_directions
        sums = of_directions.new_zeros((self.sets, *of_directions.shape[1:]))
        for values, (view, _) in zip(of_directions, self.directions, strict=True):
            sums[view] += values
        return sums

    def of_rows(self, of_sets: Tensor) -> Tensor:
        return of_sets[:, self.own].flatten()

    def gradients(self, weigh: Callable[[Tensor, slice, Block], None], in_positives: Tensor) -> Tensor:
        """As Pairs', [v, n, d], of this rank's views.

        If targets are differentiated, the ranks sum their parts, [2, b, d]: fewer numbers than all local views.
        """
        gradients = torch.zeros_like(self.views)
        in_targets = None if self._constant else torch.zeros_like(self.table)
        for view, block in zip(self._view_of_block, self.blocks, strict=True):
            for rows, weights in self.weights(block, weigh):
                self.add_product(weights, self.table[block.columns], gradients[view, block.local(rows)])
                if in_targets is not None:
                    self.add_product(weights.T, self.anchors[rows], in_targets[block.columns])
        of_own = in_positives[:, self.own].unsqueeze(2)
        for (view, target), in_positive in zip(self.directions, of_own, strict=True):
            gradients[view].addcmul_(in_positive, self.features[target, self.own])
            if in_targets is not None:
                in_targets.view_as(self.features)[target, self.own].addcmul_(in_positive, self.views[view])
        if in_targets is not None:
            gradients[:2] += self._ranks.sum(in_targets).view_as(self.features)[:, self.own]
        return gradients


@cache
def compile_for_each_shape(operations: Callable[..., Any]) -> Callable[..., Any]:
    # Code for many shapes is slower, and its bits depend on the first of them. And to time variants of pointwise code,
    # torch would copy what that overwrites, which may be gigabytes, to pinned memory, and keep that memory.
    return torch.compile(operations, dynamic=False, options={"triton.autotune_pointwise": False})


def rounded(values: Tensor) -> Tensor:
    """Round float32 to TF32's bits, in place, to nearest: a GPU may cut them, which makes all products too small.

    By bits: a compiler may turn Veltkamp's splitting into fused operations, which round otherwise.
    """
    bits = values.view(torch.int32)
    nearest = ((bits + 0xFFF + (bits >> 13 & 1)) & -0x2000).view(torch.float32)  # half to even
    return values.copy_(torch.where(values.isfinite(), nearest, values))


def set_until(end: ExitStack, owner: Any, name: str, value: object) -> None:
    """Set an attribute until `end`, which restores it."""
    end.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
