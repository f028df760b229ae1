"""A dataset for trainings on random batches: an index and empty files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ...pipeline.dataset.index import (
    INDEX_FILE,
    SHARD_FOLDER,
    SHARD_SUFFIXES,
    TOKENIZER_FILE,
    TokenizerInfo,
    seal_index,
    shard_name,
)
from ...pipeline.opening import Dataset

TOKENIZER = TokenizerInfo(vocab_size=49_408, context_length=32, end_id=49_407)
"""CLIP's vocabulary, and the length of captions that a conversion has by default."""


def synthetic_dataset(path: Path, samples: int) -> Dataset:
    """Write a dataset of pairs to `path`, for data.loader = "synthetic": it has neither their pictures nor captions."""
    (path / SHARD_FOLDER).mkdir(parents=True)
    nothing = hashlib.sha256(b"").hexdigest()
    for suffix in SHARD_SUFFIXES:
        (path / SHARD_FOLDER / shard_name(0, suffix)).touch()
    (path / TOKENIZER_FILE).touch()
    index: dict[str, Any] = {
        "n": samples,
        "mode": "pairs",
        "captions_per_sample": 1,
        "first_id": [0, samples],
        "image": {},
        "tokenizer": TOKENIZER.model_dump(),
        "tokenizer_digest": nothing,
        "shard_digests": [dict.fromkeys(SHARD_SUFFIXES, nothing)],
        "grown_from": None,
        "source": {"kind": "synthetic"},
    }
    (path / INDEX_FILE).write_bytes(seal_index(index))
    return Dataset(path)
