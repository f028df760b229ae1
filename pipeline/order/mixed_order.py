"""The order of a mixture of datasets, made of its parts' orders."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import merge
from operator import attrgetter
from typing import Self

import numpy as np

from ...storage.arrays import Int64s
from ...storage.mixed_rows import MixedRows
from .order import Order, Window


@dataclass(frozen=True)
class MixedOrder(Order):
    """The order of a mixture of datasets: every part has an order of its own, and its share of each batch.

    A rank's share of a batch is its share of the first part's batch, then of the second's, and so on. An epoch ends
    with the part whose pass takes most steps; the others begin their next pass on the way. A part's pass and step
    follow from the run's step alone. Methods are as those of `Order`, but their ids are rows of state, which `rows`
    maps to ids of samples. The fields are of one order of all samples, from which the parts' are made.
    """

    parts: tuple[Order, ...] = ()

    @classmethod
    def of(cls, order: Order, samples: Sequence[int], shares: Sequence[int]) -> Self:
        """Mix parts of these numbers of samples, in shares that divide the batch size.

        A part has about as many blocks as the order needs for it, and windows in proportion. A full shuffle has eight
        blocks or more, since parts of one would leave more rows unused. Raises ValueError naming a part without a step.
        """
        batch, seed, shards = order.batch_size, order.seed, order.canonical_shards
        if order.window_blocks == order.blocks_per_shard:
            order = Order.create(order.samples, batch, seed, shards, max(8, order.blocks_per_shard))
        parts = []
        for number, (n, share) in enumerate(zip(samples, shares, strict=True)):
            least = -(-n // (shards * order.block_rows))  # and a few more, as in for_memory
            _, blocks = min((-n % (shards * blocks), blocks) for blocks in range(least, least * 9 // 8 + 1))
            window = -(-order.window_blocks * blocks // order.blocks_per_shard)
            if order.window_blocks < order.blocks_per_shard:
                window = min(window, max(2 * shards, order.window_blocks))  # what an order may have
            own = (batch * share // sum(shares), (seed + number) % 2**64)  # of equal parts, samples must not pair up
            try:
                parts.append(Order(n, *own, shards, blocks, window))
            except ValueError as error:
                raise ValueError(f"part {number + 1} of the mixture: {error}") from None
        return cls(order.samples, batch, seed, shards, order.blocks_per_shard, order.window_blocks, parts=tuple(parts))

    def serving_all(self) -> Self:
        return replace(self, parts=tuple(part.serving_all() for part in self.parts))

    def __post_init__(self) -> None:
        """Check nothing: the order of all samples and the parts' orders were checked."""

    @cached_property
    def rows(self) -> MixedRows:
        """The samples' rows of state, in blocks as large as the largest of any part."""
        blocks = [part.blocks_per_shard for part in self.parts]
        return MixedRows([part.samples for part in self.parts], blocks, self.canonical_shards)

    @property
    def block_rows(self) -> int:
        return self.rows.block_rows

    @property
    def steps_per_epoch(self) -> int:
        return max(part.steps_per_epoch for part in self.parts)

    @property
    def live_rows(self) -> int:
        blocks = sum(min(part.window_blocks + 2, part.blocks_per_shard) for part in self.parts)
        return blocks * self.canonical_shards * self.block_rows

    def rank_ids(self, rank: int, world: int) -> range:
        shards, rows = self._shards_of_rank(rank, world), self.rows.about.kept // self.canonical_shards
        return range(shards.start * rows, shards.stop * rows)

    def batch_ids(self, epoch: int, step: int, rank: int = 0, world: int = 1) -> Int64s:
        self._check_position(epoch, step)
        places = [divmod(self.draw(epoch, step), part.steps_per_epoch) for part in self.parts]
        shares = [each.batch_ids(*place, rank, world) for each, place in zip(self.parts, places, strict=True)]
        first = np.repeat(self.rows.first_id[:-1], [len(share) for share in shares])
        return self.rows.positions(first + np.concatenate(shares))

    def draw(self, epoch: int, step: int) -> int:
        return epoch * self.steps_per_epoch + step  # a part may meet a sample twice in an epoch

    def windows(self, epoch: int, rank: int = 0, world: int = 1) -> Iterator[Window]:
        self._check_position(epoch, 0)
        of_parts = (self._windows_of_part(number, epoch, rank, world) for number in range(len(self.parts)))
        return merge(*of_parts, key=attrgetter("first_step"))

    def _windows_of_part(self, number: int, epoch: int, rank: int, world: int) -> Iterator[Window]:
        """Yield those of the part's passes in an epoch; a window that begins before the epoch is in both."""
        part, first, steps = self.parts[number], self.draw(epoch, 0), self.steps_per_epoch
        for turn in range(first // part.steps_per_epoch, (first + steps - 1) // part.steps_per_epoch + 1):
            before = turn * part.steps_per_epoch - first
            for window in part.windows(turn, rank, world):
                low, high = max(0, before + window.first_step), min(steps - 1, before + window.last_step)
                if low <= high:
                    yield Window(low, high, np.sort(self.rows.blocks_at(number, window.blocks)))
