"""Where the rows of a batch lie: found in the shards' tables, for either loader."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .dataset import Dataset
from .errors import DatasetError
from .row_records import RECORD
from .shard import Shard
from .stored_sample import REASONS


class Placed(NamedTuple):
    """Where the rows of a batch lie; compiled code takes it as it is."""

    sample_ids: NDArray[np.int64]
    records: NDArray[np.void]
    """RECORD [b]."""
    files: NDArray[np.int64]
    """int64 [b]: descriptor of each row's .beton; valid as long as the batch's shards are kept."""
    verified: bool
    """Whether the records have checksums."""
    vocab_size: int
    """0 without captions."""
    tokens: NDArray[np.int32]
    """int32 [b, L] to be filled; L is 0 without captions."""


class Placer:
    """Finds the samples of a dataset by their ids."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def place(self, ids: NDArray[np.int64]) -> tuple[Placed, list[Shard]]:
        """Where the samples lie, and the shards to keep until they are read.

        Raises DatasetError, naming the sample, where what leads to one is damaged.
        """
        shards, rows = self.dataset.locate(ids)
        info = self.dataset.index.tokenizer
        records, files = np.empty(len(ids), RECORD), np.empty(len(ids), np.int64)
        kept = []
        by_shard = np.argsort(shards, kind="stable")
        for at in np.split(by_shard, np.flatnonzero(np.diff(shards[by_shard])) + 1):
            shard = self.dataset.shard(int(shards[at[0]]))
            of_shard = np.empty(len(at), RECORD)
            shard.read_records(rows[at], of_shard)
            records[at], files[at] = of_shard, shard.file.number
            kept.append(shard)
        placed = Placed(ids, records, files, kept[0].verified, info.vocab_size if info else 0,
                        np.empty((len(ids), info.context_length if info else 0), np.int32))  # fmt: skip
        return placed, kept

    def damaged(self, sample_id: int, fault: int) -> DatasetError:
        """What to raise for a sample that is not as it was stored; fault: a key of REASONS."""
        shard, row = (int(at[0]) for at in self.dataset.locate(np.array([sample_id])))
        return self.dataset.shard(shard).damaged(row, REASONS[fault])
