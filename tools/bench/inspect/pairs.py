"""Pairs to make a dataset of: small pictures with captions, in classes of which few are large and most are small."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ....pipeline.sources import Groups, Sample

MAX_CLASSES = 1000
EDGE = 32
"""Pixels of a picture's side."""


class PairSource:
    """`samples` pairs; class k, from 0, has about 1 / (k + 1) as many as the first."""

    mode: Literal["pairs"] = "pairs"

    def __init__(self, samples: int) -> None:
        share = 1 / np.arange(1, min(MAX_CLASSES, samples) + 1)
        last = np.round(np.cumsum(share) / share.sum() * samples).astype(np.int64)
        self._classes = np.searchsorted(last, np.arange(samples), side="right").astype(np.int32)

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> Sample:
        name = _class_name(int(self._classes[index]))
        random = np.random.default_rng(index)
        pixels = np.full((EDGE, EDGE, 3), random.integers(0, 256, 3), np.uint8)
        pixels[:, random.integers(EDGE)] = 255
        return Sample(self.uri(index), self.key(index), Image.fromarray(pixels), f"a {name} in colour {index}", name)

    def uri(self, index: int) -> str:
        """Where sample i would come from."""
        return f"made/{_class_name(int(self._classes[index]))}/{index:08d}.jpg"

    def key(self, index: int) -> str:
        """The sample's number."""
        return str(index)

    def groups(self) -> Groups:
        """The samples' classes."""
        return Groups(tuple(map(_class_name, range(int(self._classes[-1]) + 1))), self._classes)

    def captions(self, indices: NDArray[np.int64]) -> list[str]:
        """Those of a thousand of these samples: a tokenizer learns no more from the rest."""
        return [str(self[index].caption) for index in indices[:1000].tolist()]

    def chunks(self) -> None:
        """Any sample can be made at any time."""

    def stored_bytes(self) -> int:
        """Of pictures that are not stored, nothing: one shard is made of them, whatever their number."""
        return 0

    def describe(self) -> dict[str, Any]:
        """What they are."""
        return {"kind": "made", "samples": len(self)}


def _class_name(number: int) -> str:
    return f"class-{number:04d}"
