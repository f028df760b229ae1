"""How much each part converts: at full scale, for which figures are asked, and at a small one that takes seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Photographs of 400 × 300 pixels in webdataset tars."""

    max_size: int
    """Longest short side that is not reduced: above 300, JPEGs are kept byte for byte."""
    images: int = 5_000
    tars: int = 10
    rounds: int = 7

    @property
    def kept(self) -> bool:
        return self.max_size >= 300

    @property
    def memory_bytes(self) -> int:
        return 10**9  # for the worker processes

    @property
    def disk_bytes(self) -> int:
        return 3 * self.images * 50_000


FULL = {"kept": Sizes(max_size=512), "encoded": Sizes(max_size=224, rounds=5)}
SMALL = {"kept": Sizes(512, images=64, tars=2, rounds=1), "encoded": Sizes(224, images=64, tars=2, rounds=1)}
