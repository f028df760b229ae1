"""A large dataset made of a small one."""

from __future__ import annotations

import os
from pathlib import Path

from ...files import write_atomically
from ...pipeline.dataset_index import INDEX_FILE, SHARD_FOLDER, SHARD_SUFFIXES, read_index, seal_index, shard_name


def repeat_shard(path: Path, shards: int) -> None:
    """Turn a dataset whose shards are all the same into one of `shards`, links to the first one's files."""
    index = read_index(path).model_dump(mode="json", exclude={"format", "fingerprint"})
    folder, rows = path / SHARD_FOLDER, index["first_id"][1]
    for shard in range(len(index["first_id"]) - 1, shards):
        for suffix in SHARD_SUFFIXES:
            os.link(folder / shard_name(0, suffix), folder / shard_name(shard, suffix))
    index |= {
        "n": shards * rows,
        "first_id": [shard * rows for shard in range(shards + 1)],
        "shard_digests": index["shard_digests"][:1] * shards,
    }
    write_atomically(path / INDEX_FILE, seal_index(index))
