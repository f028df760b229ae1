"""Where the samples of a mixture of datasets have their rows of state.

Rows are cut into the sample order's canonical shards: each has the shard of the first part, then that of the second, and
so on, so that a rank's rows lie together whatever the number of ranks. Some rows between them stay unused.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class MixedRows:
    """Maps ids, which are those of the parts one after another, to rows and back. Raises ValueError for bad numbers."""

    samples: tuple[int, ...]
    """Samples of each part."""
    shard_ids: tuple[int, ...]
    """Ids of a canonical shard of each part; the last shard may have fewer."""
    block_ids: tuple[int, ...]
    """Ids of a block of each part; the last may have fewer."""
    block_stride: tuple[int, ...]
    """Rows from one block of a part to its next."""
    rows_per_shard: int
    shards: int

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        parts = [*zip(self.samples, self.shard_ids, self.block_ids, self.block_stride, strict=True)]
        numbers = [self.rows_per_shard, self.shards, *(number for part in parts for number in part)]
        fit = all(n <= shard * self.shards and block <= step for n, shard, block, step in parts)
        if min(numbers) < 1 or max(numbers) >= 1 << 48 or not fit or self.first_rows[-1] > self.rows_per_shard:
            raise ValueError("the rows of the mixture do not fit its samples")

    @property
    def rows(self) -> int:
        """Rows of state, used or not."""
        return self.shards * self.rows_per_shard

    @cached_property
    def first_ids(self) -> Ids:
        """Prefix sums of the parts' samples, int64 [parts + 1]."""
        return np.cumsum([0, *self.samples])

    @cached_property
    def first_rows(self) -> Ids:
        """First row of each part in a canonical shard, and their end, int64 [parts + 1]."""
        blocks = -(-np.array(self.shard_ids) // self.block_ids)
        return np.cumsum([0, *(blocks * self.block_stride)])

    def rows_of(self, ids: Ids) -> Ids:
        """Return the rows of these ids, int64 [b]."""
        part = np.searchsorted(self.first_ids, ids, "right") - 1
        shard, place = np.divmod(ids - self.first_ids[part], np.array(self.shard_ids)[part])
        block, place = np.divmod(place, np.array(self.block_ids)[part])
        rows: Ids = shard * self.rows_per_shard + self.first_rows[part] + block * np.array(self.block_stride)[part] + place
        return rows

    def ids_at(self, rows: Ids) -> Ids:
        """Return the ids of the samples of these rows, int64 [b]; any id for a row that no sample has."""
        shard, place = np.divmod(rows, self.rows_per_shard)
        part = np.minimum(np.searchsorted(self.first_rows, place, "right"), len(self.samples)) - 1
        block, place = np.divmod(place - self.first_rows[part], np.array(self.block_stride)[part])
        first = self.first_ids[part] + shard * np.array(self.shard_ids)[part]
        ids: Ids = first + block * np.array(self.block_ids)[part] + place
        return ids
