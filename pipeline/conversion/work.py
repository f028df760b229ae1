<<<<<<< HEAD
"""The work of one part of a conversion, and what was done of it."""
=======
"""What a worker gets to do, and what it tells meanwhile."""
>>>>>>> 48269456277c40cf8d743654fc73329dd48fd92a

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
