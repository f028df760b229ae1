"""Where the rows of a batch lie: found in the shards' tables, for either loader."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .dataset import Dataset
from .errors import DatasetError


class Placed(NamedTuple):
    """Where the rows of a batch lie in memory; each array [b]."""

    sample_ids: NDArray[np.int64]
    address: NDArray[np.uint64]
    """Of the JPEG's first byte; valid while the dataset is open."""
    size: NDArray[np.uint64]
    """Of the JPEG, in bytes."""
    height: NDArray[np.int64]
    width: NDArray[np.int64]


class Placer:
    """Opens every shard of a dataset once, and finds samples by their ids."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._shards = [dataset.beton(shard) for shard in range(dataset.shards)]

    def place(self, ids: NDArray[np.int64]) -> tuple[Placed, NDArray[np.int32] | None]:
        """Where the samples' pixels lie, and their tokens int32 [b, L], if the dataset has captions."""
        shards, rows = self.dataset.locate(ids)
        placed = Placed(ids, np.empty(len(ids), np.uint64), np.empty(len(ids), np.uint64),
                        np.empty(len(ids), np.int64), np.empty(len(ids), np.int64))  # fmt: skip
        info = self.dataset.index.tokenizer
        tokens = np.empty((len(ids), info.context_length), np.int32) if info else None
        for shard in np.unique(shards):
            beton, at = self._shards[shard], np.flatnonzero(shards == shard)
            placed.address[at] = beton.jpeg_address[rows[at]]
            placed.size[at] = beton.jpeg_bytes[rows[at]]
            placed.height[at], placed.width[at] = beton.heights[rows[at]], beton.widths[rows[at]]
            if tokens is not None:
                tokens[at] = beton.tokens(rows[at])
        return placed, tokens

    def undecodable(self, sample_id: int) -> DatasetError:
        """What to raise where a sample's JPEG does not decode."""
        shard, row = (int(at[0]) for at in self.dataset.locate(np.array([sample_id])))
        return DatasetError(
            f"sample {sample_id} (row {row} of shard {shard} of {self.dataset.path}) does not decode: "
            "the file was damaged after its conversion. Convert the dataset again."
        )
