"""A dataset for trainings on random batches: an index and empty files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from ...pipeline.dataset import Dataset
from ...pipeline.dataset_index import (
    INDEX_FILE,
    SHARD_FOLDER,
    SHARD_SUFFIXES,
    TOKENIZER_FILE,
    TokenizerInfo,
    seal_index,
    shard_name,
)

TOKENIZER = TokenizerInfo(vocab_size=49_408, context_length=32, end_id=49_407)
"""CLIP's vocabulary, and the length of captions that a conversion has by default."""


def synthetic_dataset(
    path: Path, samples: int, mode: Literal["images", "pairs"], tokenizer: TokenizerInfo = TOKENIZER
) -> Dataset:
    """Write a dataset of `samples` samples to `path`, for data.loader = "synthetic"; it has no pictures or captions.

    tokenizer: what the text encoder of pairs is built for.
    """
    (path / SHARD_FOLDER).mkdir(parents=True)
    nothing, pairs = hashlib.sha256(b"").hexdigest(), mode == "pairs"
    for suffix in SHARD_SUFFIXES:
        (path / SHARD_FOLDER / shard_name(0, suffix)).touch()
    if pairs:
        (path / TOKENIZER_FILE).touch()
    index: dict[str, Any] = {
        "n": samples,
        "mode": mode,
        "captions_per_sample": int(pairs),
        "first_id": [0, samples],
        "image": {},
        "tokenizer": tokenizer.model_dump() if pairs else None,
        "tokenizer_digest": nothing if pairs else None,
        "shard_digests": [dict.fromkeys(SHARD_SUFFIXES, nothing)],
        "grown_from": None,
        "source": {"kind": "synthetic"},
    }
    (path / INDEX_FILE).write_bytes(seal_index(index))
    return Dataset(path)
