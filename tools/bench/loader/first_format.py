"""The same samples as a dataset of format 1, whose rows have no checksums."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ....files import sha256_of
from ....pipeline.dataset import Dataset
from ....pipeline.dataset_index import INDEX_FILE, SHARD_FOLDER, TOKENIZER_FILE, shard_name


def write_first_format(dataset: Dataset, to: Path) -> Dataset:
    """Write the directory `to`; its .beton files are links to the dataset's."""
    index, digests = dataset.index, []
    (to / SHARD_FOLDER).mkdir(parents=True)
    for shard in range(dataset.shards):
        beton, parquet = (to / SHARD_FOLDER / shard_name(shard, suffix) for suffix in ("beton", "parquet"))
        os.link(dataset.path / SHARD_FOLDER / beton.name, beton)
        start, end = dataset.first_id[shard : shard + 2]
        pq.write_table(dataset.take(np.arange(start, end), dataset.schema.names), parquet)
        digests.append(sha256_of(beton, parquet))
    if index.tokenizer:
        os.link(dataset.tokenizer_path, to / TOKENIZER_FILE)
    tree: dict[str, Any] = {
        "format": 1,
        **index.model_dump(mode="json", include={"n", "mode", "first_id", "image", "tokenizer"}),
        "shard_digests": digests,
    }
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    tree |= {"source": index.source, "fingerprint": hashlib.sha256(text.encode()).hexdigest()}
    (to / INDEX_FILE).write_text(json.dumps(tree, indent=1), "utf-8")
    return Dataset(to)
