"""Reading a store's snapshots: no lock, no torch, no change; works while a run trains."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from .durable import Description, Repository, Snapshot, array_of
from .errors import FieldError


class StateReader:
    """The state of all samples as it was at one snapshot; what is written later does not show.

    Use `open`. Arrays are read chunk by chunk as they are indexed; `column` reads one whole.
    """

    def __init__(self, group: zarr.Group, description: Description, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.samples = description.samples
        self.block_rows = description.block_rows
        self.dataset_fingerprint = description.dataset_fingerprint
        self.fields = description.schema.names
        """Names of the float32 fields; the uint32 columns `visits` and `last_step` can be read beside them."""
        self._columns = description.schema.columns
        self._group = group

    @classmethod
    def open(cls, path: str | os.PathLike[str], at: str = "latest") -> "StateReader":
        """Open the store at `path` as it was at a tag (`step-200`), a snapshot id, or `latest`.

        Raises StoreNotFoundError, or SnapshotNotFoundError that lists the tags there are.
        """
        repository = Repository.open(Path(path))
        snapshot = repository.resolve(at)
        return cls(repository.group(snapshot), repository.describe(snapshot), snapshot)

    def array(self, name: str) -> "zarr.Array[Any]":
        """Return one column as a zarr array [samples], float32 or uint32; raises FieldError for an unknown name."""
        if name not in self._columns:
            raise FieldError(f"the state has no column {name!r}; it has {list(self._columns)}")
        return array_of(self._group, name)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column whole, [samples], in memory."""
        return np.asarray(self.array(name)[:])
