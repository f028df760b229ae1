"""At how many sizes, and for how long: at full scale, for which figures are asked, and at a small one of seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Batch sizes of either part, and the time that is spent on each of the first."""

    time_batches: tuple[int, ...]
    memory_batches: tuple[int, ...]
    seconds: float


_BATCHES = (512, 1024, 2048, 4096, 8192)

FULL = Sizes(_BATCHES, (*_BATCHES, 32_768), seconds=60.0)
SMALL = Sizes((64, 128), (64, 128), seconds=0.1)
