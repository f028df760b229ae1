"""The limits that a cache of `data.cache` bytes sets for the sample order of a dataset in an object store."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from ...pipeline.opening import Dataset
from ...pipeline.order.order import Order
from ...storage.arrays import Int64s
from ...storage.files import free_bytes
from ..config import DataConfig
from ..errors import ConfigError
from ..world import World

RECORD_BYTES, PAGE = 64, 4096
"""Size of a sample's record, which stays in the cache; allocation unit of disks."""


@dataclass(frozen=True)
class DatasetCache:
    """The cache of each rank, and orders' needs of it."""

    place: str
    limit: int
    """Bytes on disk, for one rank."""
    is_set: bool
    """Whether data.cache is set; if not, the limit is this rank's share of half of the free disk."""
    first_id: Int64s
    beton_bytes: Int64s
    """int64 [shards]: sizes of the .beton files."""
    ranks: int

    @classmethod
    def of(cls, config: DataConfig, dataset: Dataset, world: World) -> Self | None:
        """Return the cache that the settings allow; None if the dataset is on disk."""
        if (beton_bytes := dataset.files.beton_bytes()) is None:
            return None
        from ...pipeline.remote.samples import cache_root

        limit = config.cache or free_bytes(cache_root()) // 2 // world.local_size
        return cls(str(dataset.place), limit, config.cache is not None, dataset.first_id, beton_bytes, world.size)

    @property
    def rows(self) -> int:
        """Rows of mean size that the caches of all ranks hold."""
        return int(self.limit * self.ranks // (RECORD_BYTES + self.beton_bytes.sum() / self.first_id[-1]))

    def narrowed(self, order: Order, rows: int) -> int:
        """Return the rows to plan for: fewer than `rows`, for which `order` was planned, if it needs too much.

        A sixteenth fewer than in proportion, because an order's blocks do not come in all sizes.
        """
        needed, records = self.needed(order), self._needed_by_records(order)
        if needed <= self.limit:
            return rows
        return int(rows * 15 / 16 * max(0, self.limit - records) / (needed - records))

    def needed(self, order: Order) -> int:
        """Return the bytes that an order needs in the cache of any one rank: its live blocks, and all its records.

        Blocks are assumed to have their share of the shards' bytes, plus an eighth if not all of a rank's are live, or
        if samples are selected, which may be larger than others.
        """
        shards, live = order.canonical_shards, min(order.window_blocks + 2, order.blocks_per_shard)
        starts = np.minimum(np.arange(shards * order.blocks_per_shard + 1) * order.block_rows, order.samples)
        if self._all_in(order):
            before = np.interp(starts, self.first_id, np.concatenate([[0], np.cumsum(self.beton_bytes)]))
        else:  # positions of selected samples, whose ids are not known yet
            before = starts * (self.beton_bytes.sum() / self.first_id[-1])
        of_blocks = np.sort(np.diff(before).reshape(shards, order.blocks_per_shard) + 2 * PAGE, axis=1)
        of_ranks = of_blocks[:, -live:].sum(axis=1).reshape(self.ranks, -1).sum(axis=1)
        is_known = order.window_blocks == order.blocks_per_shard and self._all_in(order)
        return int(of_ranks.max() * (1 if is_known else 9 / 8)) + self._needed_by_records(order)

    def _needed_by_records(self, order: Order) -> int:
        """Return the bytes of the pages with a rank's records; for a selection, a page per sample, at most all."""
        rows = -(-order.samples // self.ranks)
        pages = self.first_id[-1] * RECORD_BYTES // PAGE
        own = RECORD_BYTES * rows if self._all_in(order) else PAGE * int(min(rows, pages))
        return own + 3 * PAGE * len(self.beton_bytes)

    def _all_in(self, order: Order) -> bool:
        return bool(order.samples == self.first_id[-1])

    def check(self, order: Order, narrowest: Order) -> None:
        """Raise ConfigError if the order needs more. narrowest: an alternative order, to name the least possible."""
        needed, least = self.needed(order), min(self.needed(order), self.needed(narrowest))
        if needed <= self.limit:
            return
        if self.is_set:
            raise ConfigError(
                f"data.cache = {self.limit:,} is too small for {self.place}: the order's {order.canonical_shards} "
                f"shards have windows of {order.window_blocks:,} of {order.blocks_per_shard:,} blocks of "
                f"{order.block_rows:,} rows, which need {needed:,} bytes of each rank's cache at once. Set data.cache "
                f"to at least {least:,}"
            )
        raise ConfigError(
            f"{self.place} takes {needed:,} bytes of this rank's cache, more than its share of half of the free disk, "
            f"{self.limit:,}. Set data.cache to the bytes that it may take, at least {least:,}, or THERMOPILE_CACHE to "
            "a folder on a larger disk"
        )
