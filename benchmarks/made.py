"""Datasets made for a benchmark: one shard is converted, and linked under the names of as many as are wanted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.dataset.index import (
    INDEX_FILE,
    SHARD_FOLDER,
    SHARD_SUFFIXES,
    read_index,
    seal_index,
    shard_name,
)
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources import ClassGroups, Sample, Source
from thermopile.storage.files import write_atomically

EDGE = 32
"""Pixels of a picture's side."""


def make_pairs(path: Path, shard_rows: int, shards: int) -> Dataset:
    """Write a dataset of `shards` times the same `shard_rows` pairs."""
    convert(PairSource(shard_rows), path, ConvertSettings(), workers=1)
    return repeat_shard(path, shards)


def repeat_shard(path: Path, shards: int) -> Dataset:
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
    return Dataset(path)


class PairSource(Source):
    """`samples` small pictures with captions, in 1,000 classes at most; class k, from 0, has about 1 / (k + 1) as many
    samples as the first."""

    mode = "pairs"

    def __init__(self, samples: int) -> None:
        share = 1 / np.arange(1, min(1000, samples) + 1)
        last = np.round(np.cumsum(share) / share.sum() * samples).astype(np.int64)
        self._classes = np.searchsorted(last, np.arange(samples), side="right").astype(np.int32)

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> Sample:
        name, random = _class_name(int(self._classes[index])), np.random.default_rng(index)
        pixels = np.full((EDGE, EDGE, 3), random.integers(0, 256, 3), np.uint8)
        pixels[:, random.integers(EDGE)] = 255
        return Sample(self.uri(index), self.key(index), Image.fromarray(pixels), f"a {name} in colour {index}", name)

    def uri(self, index: int) -> str:
        """Where a sample would come from."""
        return f"made/{_class_name(int(self._classes[index]))}/{index:08d}.jpg"

    def key(self, index: int) -> str:
        """The sample's number."""
        return str(index)

    def groups(self) -> ClassGroups:
        """The samples' classes."""
        return ClassGroups(tuple(map(_class_name, range(int(self._classes[-1]) + 1))), self._classes)

    def captions(self, indices: NDArray[np.int64]) -> list[str]:
        """Those of a thousand of these samples: a tokenizer learns no more from the rest."""
        return [str(self[index].caption) for index in indices[:1000].tolist()]

    def chunks(self) -> None:
        """Any sample can be made at any time."""

    def stored_bytes(self) -> int:
        """None: the pictures are not stored, and make one shard whatever their number."""
        return 0

    def describe(self) -> dict[str, Any]:
        """What the samples are."""
        return {"kind": "made", "samples": len(self)}


def _class_name(number: int) -> str:
    return f"class-{number:04d}"
