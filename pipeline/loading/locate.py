"""Locate the rows of a batch in the shards' tables, for both loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dataset import Dataset
from ..errors import DatasetError
from ..rng import compiled
from ..row_records import RECORD
from ..shard import max_open_shards
from ..stored_sample import REASONS, SOUND, fetch_jpeg, fetch_tokens


class Placed(NamedTuple):
    """Locations of the rows of a batch, in a form that compiled code accepts."""

    sample_ids: NDArray[np.int64]
    shards: NDArray[np.int64]
    files: NDArray[np.int64]
    """int64 [b]: descriptor of each row's .beton, while `Placer.runs` holds it open; else -1."""
    jpeg_at: NDArray[np.uint64]
    """This and the next fields are columns of RECORD, [b] each."""
    jpeg_bytes: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]
    jpeg_checksum: NDArray[np.uint64]
    tokens_at: NDArray[np.uint64]
    captions: NDArray[np.int64]
    tokens_checksum: NDArray[np.uint64]
    verified: bool
    """Whether the records have checksums."""
    vocab_size: int
    """Vocabulary size; 0 without captions."""
    tokens: NDArray[np.int32]
    """int32 [b, L], filled by `fetch`; L is 0 without captions."""


_COLUMNS = {
    "jpeg_at": np.uint64, "jpeg_bytes": np.int64, "height": np.int64, "width": np.int64, "jpeg_checksum": np.uint64,
    "tokens_at": np.uint64, "captions": np.int64, "tokens_checksum": np.uint64,
}  # fmt: skip


@compiled
def fetch(placed: Placed, row: int, memory: NDArray[np.uint8]) -> int:
    """Read a row's JPEG to the start of `memory`, uint8 [its bytes or more], and its tokens into placed.tokens.

    Returns SOUND or the fault. If SOUND, height and width equal those in the JPEG's header.
    """
    fault = fetch_jpeg(
        placed.files[row], placed.jpeg_at[row], placed.height[row], placed.width[row], placed.jpeg_checksum[row],
        placed.verified, memory[: placed.jpeg_bytes[row]],
    )  # fmt: skip
    if fault != SOUND:
        return fault
    return fetch_tokens(
        placed.files[row], placed.tokens_at[row], placed.captions[row], placed.tokens_checksum[row], placed.verified,
        placed.vocab_size, placed.tokens[row],
    )  # fmt: skip


class Placer:
    """Locates a dataset's samples by id and opens their files for the reading threads."""

    def __init__(self, dataset: Dataset, readers: int) -> None:
        """readers: number of concurrent reading threads, which share the limit of open files."""
        self.dataset = dataset
        self._max_run = max(1, max_open_shards() // readers)

    def place(self, ids: NDArray[np.int64]) -> Placed:
        """Locate the samples. Raises DatasetError naming the first sample with a damaged record."""
        shards, rows = self.dataset.locate(ids)
        info = self.dataset.index.tokenizer
        records = np.empty(len(ids), RECORD)
        by_shard = np.argsort(shards, kind="stable")
        for at in np.split(by_shard, np.flatnonzero(np.diff(shards[by_shard])) + 1):
            shard = self.dataset.shard(int(shards[at[0]]))
            records[at] = shard.records(rows[at])
        tokens = np.empty((len(ids), info.context_length if info else 0), np.int32)
        columns: dict[str, Any] = {name: records[name].astype(kind) for name, kind in _COLUMNS.items()}
        verified, vocab_size = shard.verified, info.vocab_size if info else 0
        files = np.full(len(ids), -1)
        return Placed(ids, shards, files, **columns, verified=verified, vocab_size=vocab_size, tokens=tokens)

    def runs(self, placed: Placed, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield rows low … high - 1 as short runs (from, to) to limit open files; a run's files close at the next run.

        Threads may share a batch, each with its own rows. Raises DatasetError; OSError if a file cannot be opened.
        """
        for start in range(low, high, self._max_run):
            end = min(start + self._max_run, high)
            shards = placed.shards[start:end].tolist()
            kept = {shard: self.dataset.beton(shard) for shard in set(shards)}
            placed.files[start:end] = [kept[shard].number for shard in shards]
            yield start, end
            placed.files[start:end] = -1
            kept.clear()

    def damaged(self, sample_id: int, fault: int) -> DatasetError:
        """Return the error to raise for a damaged sample; fault: a key of REASONS."""
        shard, row = (int(at[0]) for at in self.dataset.locate(np.array([sample_id])))
        return self.dataset.shard(shard).damaged(row, REASONS[fault])
