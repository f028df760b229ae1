"""The fields of one row of state, their initial values, their layout in the row; and a store's description."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..storage.place import Place
from .errors import FieldError, StoreMismatchError

VISITS = "visits"
LAST_STEP = "last_step"
COUNTERS = (VISITS, LAST_STEP)
"""uint32 columns that the store maintains itself, at the end of each row: accepted puts, and the last put's step."""


@dataclass(frozen=True)
class Schema:
    """Float32 fields in row order, each with the initial value for unseen samples.

    Raises FieldError for a name that is reserved or is not a path of identifiers, and for a NaN.
    """

    initial: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, value in self.initial.items():
            if not re.fullmatch(r"[A-Za-z_]\w*(/[A-Za-z_]\w*)*", name):
                raise FieldError(f"field {name!r} is not a path such as 'image/tau': use identifiers joined by '/'")
            if name in COUNTERS:
                raise FieldError(f"field {name!r} is maintained by the store itself; remove it from the fields")
            if math.isnan(value):
                raise FieldError(f"the initial value of field {name!r} is NaN; use a number, or -inf for 'unseen'")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.initial)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns: the fields, then visits and last_step."""
        return (*self.initial, *COUNTERS)

    @property
    def row_words(self) -> int:
        """Row length in 32-bit words: 8 (32 B) if the columns fit, otherwise a multiple of 16 (64 B).

        Short rows share a cache line in pairs and long rows start on a line: no row straddles more than it must.
        """
        return 8 if len(self.columns) <= 8 else math.ceil(len(self.columns) / 16) * 16

    def dtype(self, column: str) -> np.dtype[np.float32] | np.dtype[np.uint32]:
        return np.dtype(np.uint32) if column in COUNTERS else np.dtype(np.float32)

    def fill_value(self, column: str) -> float | int:
        return 0 if column in COUNTERS else self.initial[column]

    def check_names(self, names: Iterable[str]) -> None:
        """Raise FieldError unless `names` are exactly the fields; `visits` is also allowed."""
        given = set(names) - {VISITS}
        missing, unknown = set(self.initial) - given, given - set(self.initial)
        if missing or unknown:
            raise FieldError(
                f"missing fields: {sorted(missing) or 'none'}; unknown fields: {sorted(unknown) or 'none'}. "
                f"Pass exactly the fields of this store: {list(self.names)}"
            )

    def to_json(self) -> dict[str, float | str]:
        # JSON has no infinities: they are stored as text, which float() parses.
        return {name: value if math.isfinite(value) else str(value) for name, value in self.initial.items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, float | str]) -> Self:
        return cls({name: float(value) for name, value in fields.items()})


@dataclass(frozen=True)
class Description:
    """The samples and fields of a store. Raises ValueError if a number is below 1."""

    samples: int
    """Number of rows: all samples of the dataset, or the selected samples, whose positions are then the ids here."""
    schema: Schema
    block_rows: int
    """Rows per zarr chunk, the unit of writing."""
    dataset_fingerprint: str
    selection: str | None = None
    """sha256 of the selected ids in the folder `selection` next to the store; None if all samples are selected."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.block_rows < 1:
            raise ValueError(f"{self.samples} samples in blocks of {self.block_rows} rows; both must be at least 1")

    def check_same(self, asked: Self, path: Place) -> None:
        """Raise StoreMismatchError, naming both sides, if the store was created for something else, blocks apart."""
        pairs = [
            ("dataset fingerprint", self.dataset_fingerprint, asked.dataset_fingerprint),
            ("number of samples", self.samples, asked.samples),
            ("selection", self.selection, asked.selection),
            ("fields", dict(self.schema.initial), dict(asked.schema.initial)),
        ]
        differing = [(what, have, want) for what, have, want in pairs if have != want]
        if differing:
            found = "; ".join(f"{what}: the store has {have}, this run has {want}" for what, have, want in differing)
            raise StoreMismatchError(
                f"{path} was made for another run. {found}. "
                "Pass the dataset and the objective that this store was made for, or start a new run"
            )
