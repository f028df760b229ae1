"""The fields of one row of state, their initial values, and where each lies in the row."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import FieldError

VISITS = "visits"
LAST_STEP = "last_step"
COUNTERS = (VISITS, LAST_STEP)
"""uint32 columns that the store keeps itself, last in every row: number of accepted puts, and step of the last one."""

_FIELD_NAME = re.compile(r"[A-Za-z_]\w*(/[A-Za-z_]\w*)*")
_WORD_BYTES = 4
_HALF_LINE_BYTES = 32
_CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class Schema:
    """Float32 fields in the order in which they stand in a row, each with the value of a sample never seen.

    Raises FieldError for a name that is no path of identifiers or that the store uses itself, and for a NaN.
    """

    initial: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, value in self.initial.items():
            if not _FIELD_NAME.fullmatch(name):
                raise FieldError(f"field {name!r} is not a path such as 'image/tau': use identifiers joined by '/'")
            if name in COUNTERS:
                raise FieldError(f"field {name!r} is kept by the store itself; leave it out of the fields")
            if math.isnan(value):
                raise FieldError(f"the initial value of field {name!r} is NaN; use a number, or -inf for 'never seen'")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.initial)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns of a row: the fields, then visits and last_step."""
        return (*self.initial, *COUNTERS)

    @property
    def row_words(self) -> int:
        """Length of a row in 32-bit words: 8 (32 B) where the columns fit, else a multiple of 16 (64 B).

        Two short rows share a cache line and a long one begins a line, so no row straddles more lines than it must.
        """
        needed = len(self.columns) * _WORD_BYTES
        if needed <= _HALF_LINE_BYTES:
            return _HALF_LINE_BYTES // _WORD_BYTES
        return math.ceil(needed / _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES // _WORD_BYTES

    def dtype(self, column: str) -> np.dtype[np.float32] | np.dtype[np.uint32]:
        return np.dtype(np.uint32) if column in COUNTERS else np.dtype(np.float32)

    def fill_value(self, column: str) -> float | int:
        return 0 if column in COUNTERS else self.initial[column]

    def initial_record(self) -> npt.NDArray[np.uint32]:
        """Return the record of a sample never seen, [row_words]."""
        record = np.zeros(self.row_words, dtype=np.uint32)
        record.view(np.float32)[: len(self.initial)] = list(self.initial.values())
        return record

    def check_names(self, names: Iterable[str]) -> None:
        """Raise FieldError unless `names` are exactly the fields; `visits` may stand among them."""
        given = set(names) - {VISITS}
        missing, unknown = set(self.initial) - given, given - set(self.initial)
        if missing or unknown:
            raise FieldError(
                f"missing fields: {sorted(missing) or 'none'}; unknown fields: {sorted(unknown) or 'none'}. "
                f"Pass exactly the fields of this store: {list(self.names)}"
            )

    def to_json(self) -> dict[str, float | str]:
        # JSON has no infinities: they travel as text, which float() reads as well.
        return {name: value if math.isfinite(value) else str(value) for name, value in self.initial.items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, float | str]) -> "Schema":
        return cls({name: float(value) for name, value in fields.items()})
