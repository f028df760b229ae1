"""What a worker gets to do, and what it tells meanwhile."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..sources.webdataset import TarWork

Work = NDArray[np.int64] | TarWork
"""Source indices, or tars to be read in order."""


class Counts(NamedTuple):
    """Progress of the conversion."""

    done: int
    """What was processed of the source: samples, usable or not, or bytes of tars."""
    seen: int
    """Samples processed, usable or not."""
    left_out: int
    files: int = 0
    """Tars processed."""

    def plus(self, other: Self) -> Self:
        return type(self)(*map(sum, zip(self, other, strict=True)))
