"""Progress of a conversion."""

from typing import NamedTuple, Self


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
