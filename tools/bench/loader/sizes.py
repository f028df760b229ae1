"""How much each part measures: at full scale, for which figures are asked, and at a small one that takes seconds."""

from __future__ import annotations

from dataclasses import dataclass

_STORED_BYTES = 50_000
"""Of a photograph, rounded up."""


@dataclass(frozen=True, kw_only=True)
class _Photographs:
    """What is loaded, as files and as a dataset."""

    images: int = 256
    """Of 400 × 300 pixels, in the page cache."""
    image_size: int = 224

    @property
    def memory_bytes(self) -> int:
        return 0

    @property
    def disk_bytes(self) -> int:
        return 2 * self.images * _STORED_BYTES + 2**24


@dataclass(frozen=True, kw_only=True)
class RateSizes(_Photographs):
    """Batches that each contender serves once a round."""

    case: str
    """Of cases.py."""
    images: int = 2_048
    batch: int = 64
    warm_up: int = 4
    """Batches of a round that are not timed: they fill what a contender keeps ready."""
    batches: int = 12
    """Batches of a round that are timed."""
    rounds: int = 7

    @property
    def memory_bytes(self) -> int:
        return 60 * self.batch * 3 * self.image_size**2 * 4  # several batches ahead, of two views, in five contenders


@dataclass(frozen=True)
class CostSizes(_Photographs):
    """Images that go through each step on one core."""

    rounds: int = 5


@dataclass(frozen=True)
class ResizeSizes(_Photographs):
    """Crops of the recipe's own distribution of boxes."""

    epochs: int = 4
    """Crops of each image."""


@dataclass(frozen=True)
class OpenSizes:
    """A dataset of many rows of a tiny picture; its shards are one file under several names."""

    shards: int = 763
    rows: int = 131_072
    """Of a shard."""
    batch: int = 1024
    batches: int = 20
    """Drawn from all shards."""
    first_format_shards: int = 8
    """Rows of a shard that is opened as format 1."""

    @property
    def memory_bytes(self) -> int:
        return 1 << 30

    @property
    def disk_bytes(self) -> int:
        return self.rows * 1_000 + 2**24


Sizes = RateSizes | CostSizes | ResizeSizes | OpenSizes

FULL: dict[str, Sizes] = {
    "single": RateSizes(case="single"),
    "two_views": RateSizes(case="two_views"),
    "simclr": RateSizes(case="simclr", rounds=5),
    "checksum": RateSizes(case="checksum", batches=16, rounds=25),
    "cost": CostSizes(),
    "resize": ResizeSizes(),
    "open": OpenSizes(),
}

SMALL: dict[str, Sizes] = {
    "single": RateSizes(case="single", images=64, batch=16, warm_up=1, batches=2, rounds=1, image_size=64),
    "two_views": RateSizes(case="two_views", images=64, batch=16, warm_up=1, batches=2, rounds=1, image_size=64),
    "simclr": RateSizes(case="simclr", images=64, batch=16, warm_up=1, batches=2, rounds=1, image_size=64),
    "checksum": RateSizes(case="checksum", images=64, batch=16, warm_up=1, batches=2, rounds=1, image_size=64),
    "cost": CostSizes(images=16, rounds=1),
    "resize": ResizeSizes(images=16, epochs=1),
    "open": OpenSizes(shards=2, rows=256, batch=64, batches=2, first_format_shards=1),
}
