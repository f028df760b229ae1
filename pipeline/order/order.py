"""The sample order: a pure function (seed, epoch, step, rank, world) -> sample ids, computed and never stored.

Each canonical shard's ids are shuffled by two keyed bijections: its blocks are permuted, then places are shuffled
within windows of `window_blocks` of those blocks. bijection.py finds any place of any epoch in O(1) time and memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import merge
from operator import attrgetter
from typing import Self

import numpy as np

from ...storage.arrays import Int64s
from ...storage.selection import Selection
from .bijection import fill_places, find_places, shard_key, window_at

ORDER_VERSION = 1
"""Names the mapping below. Raise it with any change that moves an id: a resumed run relies on the same order."""

MAX_BLOCK_ROWS = 65_536
"""Maximum rows of a block: one block is one zarr chunk of the state, read and written whole."""

MIN_ROWS_PER_STEP = 16
"""Minimum ids that a step takes from one shard: with fewer, samples of one shard rarely meet as negatives."""

MIN_LEFT = 2
"""Minimum ids that a step keeps of each shard, and of each piece of a batch, beside holes: one alone has no negatives,
and no deviation for a batch norm."""

FEW_SHARDS, MANY_SHARDS = 8, 64
"""Canonical shards by default, for a small dataset and at most. An epoch ends with the shortest shard, which may lack
almost as many samples as there are shards; the default lets a hundredth of a shard lack at most."""


def too_few(samples: int) -> str:
    """Say that so few samples cannot be trained on."""
    return f"{samples:,} sample{'s' * (samples != 1)}, but training takes at least {MIN_ROWS_PER_STEP}; add samples"


def usual_shards(samples: int, batch_size: int) -> int:
    """Return the most canonical shards, a power of two, that divide a batch and take 16 ids of it each.

    At most 8, or 64 if a shard has a hundred samples for each shard, and an epoch loses no more than a hundredth of its
    steps by the shortest. As many ranks at most can share the run.
    """

    def steps(shards: int) -> int:
        return (samples - (shards - 1) * -(-samples // shards)) // (batch_size // shards)

    halves = (MANY_SHARDS >> k for k in range(MANY_SHARDS.bit_length()))
    fits = [n for n in halves if batch_size % n == 0 and batch_size // n >= MIN_ROWS_PER_STEP]
    few = next((n for n in fits if n <= FEW_SHARDS), 1)
    many = (n for n in fits if n > FEW_SHARDS and 100 * n**2 <= samples and 100 * steps(n) >= 99 * steps(few))
    return next(many, few)


@dataclass(frozen=True)
class Window:
    """Blocks of one canonical shard whose ids are shuffled together, and the steps of an epoch that serve them."""

    first_step: int
    last_step: int
    """Inclusive. Both steps serve ids of these blocks, and no step outside the range does."""
    blocks: Int64s
    """Block numbers, ascending, counted over all shards: block k begins at id k * block_rows."""


@dataclass(frozen=True)
class Order:
    """Assigns samples to batches. Every field is resolved; `Order.create` fills in the defaults.

    Ids are dense int64, 0 … samples - 1, cut into `canonical_shards` ranges of `blocks_per_shard` blocks of
    `block_rows` ids; only the last may be shorter. A step takes batch_size / canonical_shards ids from every shard,
    whatever the number of ranks, and an epoch ends with the shortest shard: no id occurs twice in an epoch, and the few
    ids left out differ from epoch to epoch.

    With window_blocks < blocks_per_shard, at most (window_blocks + 2) * canonical_shards blocks are live at any step,
    counted over all ranks; a block is live from its first to its last use in the epoch.

    Raises ValueError at construction for settings that contradict each other or leave a shard without a step.
    """

    samples: int
    """Number of samples in the dataset."""
    batch_size: int
    """Samples in a global batch, over all ranks."""
    seed: int
    """Seed of the order; 0 … 2**64 - 1."""
    canonical_shards: int
    """Number of ranges of ids; divides batch_size, and the number of ranks must divide it."""
    blocks_per_shard: int
    """Blocks of a shard; the last shard may have fewer."""
    window_blocks: int
    """Blocks shuffled together; blocks_per_shard for a full shuffle of the shard."""
    whole: bool = False
    """Whether an epoch serves every id: its last batches then serve some ids again."""

    @classmethod
    def create(
        cls,
        samples: int,
        batch_size: int,
        seed: int = 0,
        canonical_shards: int | None = None,
        blocks_per_shard: int | None = None,
        window_blocks: int | None = None,
    ) -> Self:
        """Create an order with defaults for omitted arguments.

        canonical_shards: as `usual_shards`.
        blocks_per_shard: the smallest number that keeps a block at 65,536 rows or less.
        window_blocks: a full shuffle, as is any window wider than a shard.
        """
        if canonical_shards is None:
            canonical_shards = usual_shards(samples, batch_size)
        if blocks_per_shard is None:
            blocks_per_shard = max(1, -(-samples // max(1, canonical_shards * MAX_BLOCK_ROWS)))
        if window_blocks is None:
            window_blocks = blocks_per_shard
        return cls(samples, batch_size, seed, canonical_shards, blocks_per_shard, min(window_blocks, blocks_per_shard))

    @classmethod
    def for_memory(
        cls, rows: int, samples: int, batch_size: int, seed: int = 0, canonical_shards: int | None = None
    ) -> Self:
        """Create an order that fits a memory of `rows` rows over all ranks; windowed if that is fewer than samples.

        The window is the widest allowed, 2 * canonical_shards, or the widest whose blocks hold at least one step's ids
        of a shard. Live blocks take about two thirds of the memory; the rest is for reading ahead. A windowed order has
        at most 8 shards by default: the windows of more would have many small blocks, each a file of a snapshot. If the
        memory is too small even for windows of one block, the order needs the least possible: compare its `live_rows`.
        """
        order = cls.create(samples, batch_size, seed, canonical_shards)
        if order.live_rows <= rows:
            return order
        if canonical_shards is None:
            order = cls.create(samples, batch_size, seed, min(order.canonical_shards, FEW_SHARDS))
        shards = order.canonical_shards
        max_blocks = (samples - 1) // (shards * (order.rows_per_step - 1))  # more would be shorter than a step's ids
        for window in range(2 * shards, 0, -1):
            block_rows = max(1, min(MAX_BLOCK_ROWS, rows * 2 // (3 * (window + 2) * shards)))
            blocks = -(-samples // (shards * block_rows))
            if blocks <= max_blocks:
                break
        min_blocks = min(blocks, max_blocks)
        # Blocks may hold more rows than there are samples. The last shard lacks the difference, and epochs get shorter.
        nearby = range(min_blocks, min(min_blocks * 9 // 8, max_blocks) + 1)
        blocks = min(nearby, key=lambda blocks: -samples % (shards * blocks))
        return cls(samples, batch_size, seed, shards, blocks, window)

    def serving_all(self) -> Self:
        """Return this order with whole epochs."""
        return replace(self, whole=True)

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "canonical_shards", "blocks_per_shard", "window_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name):,}; it must be at least 1.")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed {self.seed} is out of range; it must be in 0 … 2**64 - 1.")
        self._check_batch()
        self._check_shards()
        self._check_window()

    @property
    def block_rows(self) -> int:
        """Rows of a block. Block k holds the ids [k * block_rows, (k + 1) * block_rows); the last may be short."""
        return -(-self.samples // (self.canonical_shards * self.blocks_per_shard))

    @property
    def shard_rows(self) -> int:
        """Rows per canonical shard; the last may be shorter."""
        return self.blocks_per_shard * self.block_rows

    @property
    def rows_per_step(self) -> int:
        """Ids that a step takes from each canonical shard."""
        return self.batch_size // self.canonical_shards

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches in an epoch, limited by the shortest shard, the last one; to serve `whole` ones, by
        the longest, the first."""
        if self.whole:
            return -(-len(self.shard_ids(0)) // self.rows_per_step)
        return len(self.shard_ids(self.canonical_shards - 1)) // self.rows_per_step

    @property
    def live_rows(self) -> int:
        """Upper bound on the rows in live blocks at any step, over all ranks."""
        return min(self.samples, (self.window_blocks + 2) * self.canonical_shards * self.block_rows)

    def shard_ids(self, shard: int) -> range:
        first = shard * self.shard_rows
        return range(first, min(first + self.shard_rows, self.samples))

    def rank_ids(self, rank: int, world: int) -> range:
        """Return the ids of the canonical shards that `rank` of `world` serves: whole blocks, except the very last.

        Raises ValueError for a world that does not divide the canonical shards.
        """
        shards = self._shards_of_rank(rank, world)
        return range(self.shard_ids(shards[0]).start, self.shard_ids(shards[-1]).stop)

    def batch_ids(self, epoch: int, step: int, rank: int = 0, world: int = 1) -> Int64s:
        """Return the ids that `rank` of `world` serves at `step` (from 0) of `epoch`: int64 [batch_size / world].

        Ids are ordered by canonical shard, so the ranks' ids, concatenated, are the batch of a single rank. The
        array is shared by all callers and must not be changed.
        Raises ValueError for a step beyond the epoch, or a world that does not divide the canonical shards.
        """
        return _batch_ids(self, epoch, step, rank, world)

    def places_of(self, ids: Int64s, epoch: int) -> Int64s:
        """Return the ids' places in an epoch's sequences of their canonical shards, int64 [m], any ids: O(1) for each.

        Step s serves the places from s * rows_per_step on; none serves the last few of a shard. Inverts `batch_ids`.
        Raises ValueError for an id out of range.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.samples:
            raise ValueError(f"ids {ids.min():,} to {ids.max():,} of {self.samples:,} samples")
        places, shards = np.empty(len(ids), np.int64), ids // self.shard_rows
        for shard in np.unique(shards).tolist():
            here = shards == shard
            found, within = np.empty(np.count_nonzero(here), np.int64), ids[here] - self.shard_ids(shard).start
            find_places(found, within, *self._shuffle(shard, epoch))
            places[here] = found
        return places

    def first_uses(self, ids: Int64s, epochs: int) -> Int64s:
        """Return the number of steps done before the first one that serves each id, int64 [m].

        An epoch leaves a few ids out; for one that none of the `epochs` serves, it is the number of all their steps.
        """
        uses, left = np.full(len(ids), epochs * self.steps_per_epoch), np.arange(len(ids))
        for epoch in range(epochs):
            steps = self.places_of(ids[left], epoch) // self.rows_per_step
            served = steps < self.steps_per_epoch
            uses[left[served]] = epoch * self.steps_per_epoch + steps[served]
            left = left[~served]
            if not len(left):
                break
        return uses

    def refuse_thin_steps(self, holes: Int64s, first_step: int, total_steps: int, pieces: int = 1) -> None:
        """Raise ValueError if a step keeps fewer than two ids of a canonical shard, or of a piece, beside holes.

        holes: ids, int64 [m]. Looks at the steps first_step … total_steps - 1, counted over all epochs. pieces: of a
        batch, over all ranks.
        """
        for epoch in range(first_step // self.steps_per_epoch, -(-total_steps // self.steps_per_epoch)):
            before = epoch * self.steps_per_epoch
            steps, rows = np.divmod(self.places_of(holes, epoch), self.rows_per_step)
            coming = (steps >= first_step - before) & (steps < min(self.steps_per_epoch, total_steps - before))
            places = (steps * self.batch_size + holes // self.shard_rows * self.rows_per_step + rows)[coming]
            for what, size in (("canonical shard", self.rows_per_step), ("rank's piece", self.batch_size // pieces)):
                found = np.bincount(places // size)
                for part in np.flatnonzero(found > size - MIN_LEFT)[:1].tolist():
                    step, left = before + part * size // self.batch_size + 1, size - found[part]
                    cure = "" if what == "canonical shard" else ", use fewer ranks or a larger micro_batch"
                    raise ValueError(
                        f"step {step:,} would keep {left} of its {size:,} samples of a {what}, but needs {MIN_LEFT}. "
                        f"Leave out fewer samples{cure}, or train on the others with --select."
                    )

    def draw(self, epoch: int, step: int) -> int:
        """Return the number by which a step's views and captions are drawn: no sample meets the same one twice."""
        return epoch

    def windows(self, epoch: int, rank: int = 0, world: int = 1) -> Iterator[Window]:
        """Yield every window that `rank` of `world` reaches in an epoch, ordered by first step.

        A block is in exactly one window, unless the epoch ends before it; in a full shuffle a shard is one window.
        Memory is that of one window, whatever the number of samples.
        Raises ValueError for a world that does not divide the canonical shards.
        """
        self._check_position(epoch, 0)
        of_shards = (self._windows_of_shard(shard, epoch) for shard in self._shards_of_rank(rank, world))
        return merge(*of_shards, key=attrgetter("first_step"))

    def _windows_of_shard(self, shard: int, epoch: int) -> Iterator[Window]:
        rows, _, _, lead, _ = shuffle = self._shuffle(shard, epoch)
        blocks, last_step = -(-rows // self.block_rows), self.steps_per_epoch - 1
        begins = min(last_step * self.rows_per_step, rows - self.rows_per_step)  # the last step
        for number in range((blocks - 1 + lead) // self.window_blocks + 1):
            low, high, members = window_at(number, *shuffle)
            first_step = low // self.rows_per_step
            if first_step > last_step:
                return
            members += shard * self.blocks_per_shard
            last = last_step if high > begins else (high - 1) // self.rows_per_step
            yield Window(first_step, last, np.sort(members))

    def _shuffle(self, shard: int, epoch: int) -> tuple[int, int, int, int, np.uint64]:
        """Return what the bijections take of a shard: its rows, the rows of a block, window, lead and key."""
        key = np.uint64(shard_key(np.uint64(self.seed), np.uint64(epoch), np.uint64(shard)))
        return len(self.shard_ids(shard)), self.block_rows, self.window_blocks, self._lead(shard), key

    def _lead(self, shard: int) -> int:
        """Return how many blocks shorter a shard's first window is, so that shards change windows at different steps.

        A change doubles a shard's live blocks for one step, so only 2 * canonical_shards / window_blocks shards may
        change together. The last shard changes at block 0 of the cycle, and its short block may bring that forward
        by less than a block, towards the shards at the cycle's last block: rounding down leaves the fewest there.
        """
        if self.window_blocks == self.blocks_per_shard:
            return 0
        turn = (shard + 1) % self.canonical_shards
        return -(turn * self.window_blocks // self.canonical_shards) % self.window_blocks

    def _check_batch(self) -> None:
        batch, shards = self.batch_size, self.canonical_shards
        if batch % shards:
            raise ValueError(
                f"batch_size {batch:,} is not a multiple of canonical_shards {shards:,}. "
                f"Use {-(-batch // shards) * shards:,}, or a number of shards that divides {batch:,}."
            )
        if self.rows_per_step < MIN_ROWS_PER_STEP:
            raise ValueError(
                f"batch_size {batch:,} takes {self.rows_per_step} ids of each of the {shards:,} canonical shards, "
                f"but the minimum is {MIN_ROWS_PER_STEP}. Raise batch_size to {MIN_ROWS_PER_STEP * shards:,}"
                f"{' or lower canonical_shards' * (shards > 1)}."
            )

    def _check_shards(self) -> None:
        if self.block_rows > MAX_BLOCK_ROWS:
            needed = -(-self.samples // (self.canonical_shards * MAX_BLOCK_ROWS))
            raise ValueError(
                f"{self.samples:,} samples in {self.canonical_shards:,} shards of {self.blocks_per_shard:,} blocks "
                f"make blocks of {self.block_rows:,} rows, above {MAX_BLOCK_ROWS:,}. "
                f"Raise blocks_per_shard to {needed:,}."
            )
        if self.steps_per_epoch < 1:
            last = self.canonical_shards - 1
            raise ValueError(
                f"{self.samples:,} samples leave {len(self.shard_ids(last)):,} for the last of {last + 1:,} canonical "
                f"shards ({self.blocks_per_shard:,} blocks of {self.block_rows:,} rows each), but a step takes "
                f"{self.rows_per_step:,} of it. Lower batch_size, canonical_shards or blocks_per_shard, or add samples."
            )

    def _check_window(self) -> None:
        window, blocks, shards = self.window_blocks, self.blocks_per_shard, self.canonical_shards
        if window > blocks:
            raise ValueError(
                f"window_blocks {window:,} is above blocks_per_shard {blocks:,}; use {blocks:,} for a full shuffle."
            )
        if blocks <= window + 2:
            return  # all blocks together stay within the bound on live blocks
        if window > 2 * shards:
            raise ValueError(
                f"window_blocks {window:,} is above {2 * shards:,}, twice canonical_shards {shards:,}: one shard that "
                f"changes windows would exceed {(window + 2) * shards:,} live blocks. Lower window_blocks to "
                f"{2 * shards:,} or raise canonical_shards to {-(-window // 2):,}; {blocks:,} is a full shuffle."
            )
        if self.rows_per_step > self.block_rows:
            raise ValueError(
                f"a step takes {self.rows_per_step:,} ids of each shard, more than a block of {self.block_rows:,} "
                "rows, so windows cannot bound the live blocks. "
                "Lower blocks_per_shard or batch_size, or leave out the window."
            )

    def _check_position(self, epoch: int, step: int) -> None:
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; epochs count from 0.")
        if not 0 <= step < self.steps_per_epoch:
            steps = f"0 … {self.steps_per_epoch - 1:,}"
            raise ValueError(f"step {step:,} is not in the epoch's steps {steps}; continue with the next epoch.")

    def _shards_of_rank(self, rank: int, world: int) -> range:
        if world < 1 or self.canonical_shards % world:
            raise ValueError(
                f"world {world} does not divide canonical_shards {self.canonical_shards}. "
                "Change the number of ranks, or start a new run with canonical_shards a multiple of it."
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not in 0 … {world - 1}, the ranks of world {world}.")
        shards = self.canonical_shards // world
        return range(rank * shards, (rank + 1) * shards)


@dataclass(frozen=True)
class Served:
    """An order as loaders serve it: ids of the dataset, without holes, each batch in one piece or in several."""

    order: Order
    selection: Selection | None
    """The samples that the order's ids are positions of; read at the first batch, so it may be written later."""
    samples: int
    """Number of samples in the dataset."""
    pieces: int = 1
    """Pieces per batch, each like a step to a loader; divides a rank's share."""

    @property
    def seed(self) -> int:
        return self.order.seed

    @property
    def batch_size(self) -> int:
        """Samples of a piece, over all ranks."""
        return self.order.batch_size // self.pieces

    @property
    def steps_per_epoch(self) -> int:
        """Number of pieces in an epoch."""
        return self.order.steps_per_epoch * self.pieces

    def batch_ids(self, epoch: int, step: int, rank: int = 0, world: int = 1) -> Int64s:
        """As `Order.batch_ids`, of the piece `step`, without holes. Raises SelectionError if it cannot be read."""
        step, piece = divmod(step, self.pieces)
        rows = self.batch_size // world  # of places: a hole must not move a sample to another piece
        places = self.order.batch_ids(epoch, step, rank, world)[piece * rows : (piece + 1) * rows]
        return places if self.selection is None else self.selection.ids_at(places[self.selection.are_present(places)])

    def shares(self, epoch: int, step: int, world: int) -> tuple[int, ...] | None:
        """Return the number of samples that each of `world` ranks serves at a step; None if all serve as many."""
        if self.selection is None or self.selection.without is None or world == 1:
            return None
        present = self.selection.are_present(self.order.batch_ids(epoch, step))
        return tuple(np.count_nonzero(present.reshape(world, -1), axis=1).tolist())

    def draw(self, epoch: int, step: int) -> int:
        return self.order.draw(epoch, step // self.pieces)


AnyOrder = Order | Served
"""The orders that a loader accepts."""


@lru_cache(maxsize=32)  # the loader and the state store request the same steps, a few steps apart
def _batch_ids(order: Order, epoch: int, step: int, rank: int, world: int) -> Int64s:
    order._check_position(epoch, step)
    shards = order._shards_of_rank(rank, world)
    ids = np.empty((len(shards), order.rows_per_step), dtype=np.int64)
    for row, shard in zip(ids, shards, strict=True):
        of_shard = order.shard_ids(shard)
        first_place = min(step * len(row), len(of_shard) - len(row))
        fill_places(row, first_place, of_shard.start, *order._shuffle(shard, epoch))
    return ids.reshape(-1)
