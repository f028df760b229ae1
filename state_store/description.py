"""The properties of a store that are fixed when it is created."""

from dataclasses import dataclass
from pathlib import Path

from .errors import StoreMismatchError
from .schema import Schema


@dataclass(frozen=True)
class Description:
    """The samples and fields of a store. Raises ValueError if a number is below 1."""

    samples: int
    schema: Schema
    block_rows: int
    """Rows per zarr chunk, the unit of writing."""
    dataset_fingerprint: str

    def __post_init__(self) -> None:
        if self.samples < 1 or self.block_rows < 1:
            raise ValueError(
                f"a store of {self.samples} samples in blocks of {self.block_rows} rows; both must be at least 1"
            )

    def check_same(self, *, samples: int, schema: Schema, dataset_fingerprint: str, path: Path) -> None:
        """Raise StoreMismatchError, naming both sides, if the store was created for something else."""
        pairs = [
            ("dataset fingerprint", self.dataset_fingerprint, dataset_fingerprint),
            ("number of samples", self.samples, samples),
            ("fields", dict(self.schema.initial), dict(schema.initial)),
        ]
        differences = [
            f"{what}: the store has {have}, this run has {want}" for what, have, want in pairs if have != want
        ]
        if differences:
            raise StoreMismatchError(
                f"{path} was made for another run. {'; '.join(differences)}. "
                "Pass the dataset and the objective that this store was made for, or start a new run"
            )
