"""Reading a store's snapshots without a lock, torch or any change to it; works while a run trains."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy.typing as npt
import zarr

from .chunks import read_rows
from .commit import array_of
from .durable import Repository
from .errors import DamagedChunkError, FieldError, SnapshotNotFoundError
from .history import Snapshot


class StateReader:
    """The state of all samples at one snapshot; later writes are not visible.

    Use `open`. `column` reads one whole column, `rows` a range of ids from several columns, `array` only what is
    indexed. All raise FieldError for an unknown column. `column` and `rows` raise DamagedChunkError, which names the
    file, and SnapshotNotFoundError if the run has deleted the snapshot.
    """

    def __init__(self, repository: Repository, snapshot: Snapshot) -> None:
        self._repository = repository
        self._description = description = repository.description
        self._group: zarr.Group = repository.group(snapshot)
        self.snapshot = snapshot
        self.samples = description.samples
        self.block_rows = description.block_rows
        """Rows per chunk. Reading whole chunks is fastest: chunk k holds ids from k * block_rows on."""
        self.dataset_fingerprint = description.dataset_fingerprint
        self.fields = description.schema.names
        """Names of the float32 fields."""
        self.initial = dict(description.schema.initial)
        """Initial value of each field, for unseen samples."""
        self.columns = description.schema.columns
        """The fields, then the uint32 columns `visits` and `last_step`."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], at: str = "latest") -> "StateReader":
        """Open the store at `path` at a tag (`step-200`), a snapshot id, or `latest`.

        Raises StoreNotFoundError, or SnapshotNotFoundError that lists the existing tags.
        """
        repository = Repository.open(Path(path))
        return cls(repository, repository.resolve(at))

    def array(self, name: str) -> "zarr.Array[Any]":
        """Return one column as a zarr array [samples], float32 or uint32, which reads chunks as it is indexed."""
        self._check_known([name])
        return array_of(self._group, name)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one whole column, [samples], float32 or uint32, in memory."""
        return self.rows(0, self.samples, [name])[name]

    def rows(self, start: int, stop: int, columns: Iterable[str] | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return the rows of ids start … stop − 1 by column, each [stop − start]; all columns by default.

        Raises ValueError unless 0 <= start <= stop <= samples.
        """
        if not 0 <= start <= stop <= self.samples:
            raise ValueError(f"rows {start} … {stop} of a state of {self.samples:,} samples; ids are 0 … samples - 1")
        names = self.columns if columns is None else tuple(columns)
        self._check_known(names)
        try:
            return {name: read_rows(self._group, self._description, name, start, stop) for name in names}
        except DamagedChunkError as error:
            if self._repository.holds(self.snapshot.id):
                raise
            raise SnapshotNotFoundError(
                f"{self._repository.path}: {self.snapshot.tag} was deleted while it was read; a run keeps only its "
                "newest snapshots. Read a later one"
            ) from error

    def _check_known(self, names: Iterable[str]) -> None:
        if unknown := [name for name in names if name not in self.columns]:
            raise FieldError(f"the state has no column {unknown[0]!r}; it has {list(self.columns)}")
