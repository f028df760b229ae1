"""The places of a mixture's samples in the rows of state; in `RUN/selection/mixture.json`.

The rows of a canonical shard of the sample order are blocks of the first part's shard, then of the second's, and so on:
so a rank's rows lie together, whatever the number of ranks. A part's blocks may leave rows at their ends unused.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, Field

from .arrays import Bools, Int64s
from .place import Place
from .sealed_json import DamagedJSONError, seal_document, unseal
from .selection import About, Selection, unusable

MIXTURE = "mixture.json"
_Count = Annotated[int, Field(ge=1, lt=1 << 48)]
_Counts = Annotated[list[_Count], Field(min_length=1, max_length=1 << 16)]


class _Numbers(BaseModel, strict=True, extra="forbid"):
    samples: _Counts
    blocks: _Counts
    shards: _Count


class MixedRows(Selection):
    """Maps ids, which are those of the parts one after another, to rows, and back: rows are the positions here."""

    ids = without = None

    def __init__(self, samples: Sequence[int], blocks: Sequence[int], shards: int) -> None:
        """samples: of each part. blocks: of each part in each of the `shards` canonical shards."""
        self.samples, self.blocks, self.shards = [*samples], [*blocks], shards
        self.block_ids = np.array([-(-n // (shards * count)) for n, count in zip(samples, blocks, strict=True)])
        """Ids of a block of each part, int64 [parts]."""
        self.block_rows = int(self.block_ids.max())
        self.first_id, self.first_block = np.cumsum([0, *samples]), np.cumsum([0, *blocks])
        """First id of each part, and first block in a canonical shard, with the end: int64 [parts + 1]."""

    @cached_property
    def about(self) -> About:
        rows, digest = self.shards * int(self.first_block[-1]) * self.block_rows, hashlib.sha256(self._sealed())
        return About.model_construct(samples=sum(self.samples), kept=rows, ids=digest.hexdigest(), weights=None)

    def positions(self, ids: Int64s, expected: Int64s | None = None) -> Int64s:
        """Return the rows of these ids, int64 [b]."""
        part = np.searchsorted(self.first_id, ids, "right") - 1
        block, place = np.divmod(ids - self.first_id[part], self.block_ids[part])
        return self.blocks_at(part, block) * self.block_rows + place

    def blocks_at(self, part: Int64s | int, blocks: Int64s) -> Int64s:
        """Return the numbers of a part's blocks among those of all parts."""
        shard, block = np.divmod(blocks, np.array(self.blocks)[part])
        return np.asarray(shard * self.first_block[-1] + self.first_block[part] + block)

    def ids_at(self, positions: Int64s) -> Int64s:
        """Return the ids of the samples of these rows, int64 [b]; any number for a row without a sample."""
        block, place = np.divmod(positions, self.block_rows)
        shard, block = np.divmod(block, self.first_block[-1])
        part = np.searchsorted(self.first_block, block, "right") - 1
        block += shard * np.array(self.blocks)[part] - self.first_block[part]
        return np.asarray(self.first_id[part] + block * self.block_ids[part] + place)

    def are_used(self, rows: Int64s) -> Bools:
        """Return which rows have a sample, bool [b]."""
        ids = np.minimum(self.ids_at(rows), self.about.samples - 1)
        return np.asarray(self.positions(ids) == rows)

    def verify(self) -> None:
        """Do nothing: the numbers are sealed."""

    def _sealed(self) -> bytes:
        return seal_document({"samples": self.samples, "blocks": self.blocks, "shards": self.shards})

    def write(self, folder: Place) -> None:
        """Write a new run's mixture. Raises OSError."""
        folder.make()
        (folder / MIXTURE).rewrite(self._sealed())

    @classmethod
    def read(cls, folder: Place) -> Self:
        """Read a run's mixture. Raises SelectionError, OSError."""
        try:
            rows = cls(**dict(_Numbers.model_validate(unseal((folder / MIXTURE).read_bytes()))))
        except (DamagedJSONError, ValueError) as error:
            raise unusable(folder / MIXTURE, f"is damaged: {' '.join(str(error).split())}") from None
        rows.folder = folder
        return rows
