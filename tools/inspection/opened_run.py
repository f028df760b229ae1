"""Open a run in a notebook: temperatures as lazy zarr arrays and as pandas frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ...pipeline.opening import Dataset
from ...state_store.durable import list_snapshots
from ...state_store.errors import FieldError, SampleIdError, StoreNotFoundError
from ...state_store.history import Snapshot
from ...storage.place import AnyPlace, Place, Places, place_of
from ...trainer.config import TrainConfig
from ...trainer.run_directory import RunDirectory
from . import Int64s
from .opening import LATEST, STATE_ROWS_AT_ONCE, Inspection, read_run
from .rows_export import SAMPLE_ID, sample_columns
from .temperatures.kinds import KIND, KIND_NAMES, KindRules

if TYPE_CHECKING:
    import pandas as pd
    import zarr

    from ...state_store.reader import Scattered


def open_run(path: AnyPlace, data: Places | None = None) -> OpenedRun:
    """Open a run read-only, finished or still training; `path` may be an address, such as s3://bucket/runs/a.

    data: new path of the run's dataset, if it was moved; of a mixture, a list of its parts' paths. Without a usable
    dataset the run still opens, and `notes` say why the dataset is missing.
    Raises RunError if `path` is not a run or its state is another run's, DatasetError if `data` is not its dataset.

        >>> thermopile.open_run("runs/mine").temperatures().frame(columns=["caption", "text/tau"]).shape
        (72, 2)
    """
    return OpenedRun(RunDirectory(place_of(path)), data)


class OpenedRun:
    """A run's settings, snapshots, dataset and temperatures. Created by `open_run`."""

    def __init__(self, run: RunDirectory, data: Places | None) -> None:
        self._run, self._data = run, data
        opened = read_run(run, data=data)
        self.path: Place = run.path
        self.config: TrainConfig = opened.config
        """Every setting, as the run was started with."""
        self.dataset: Dataset | None = opened.dataset
        """Samples table and pictures (`dataset.jpeg(sample_id)`); None if it cannot be used."""
        self.notes: list[str] = opened.notes
        """Missing parts, each with its reason."""

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        import pandas as pd

        data, last = self.config.data.places, self.snapshots[-1:]
        facts = {"run": self.path, "objective": self.config.objective.name, "dataset": data, "notes": self.notes}
        steps = {"steps": last[0].step if last else 0, "epochs": self.config.epochs}
        return str(pd.Series(facts | steps).to_frame().to_html(header=False))

    @property
    def snapshots(self) -> list[Snapshot]:
        """Current snapshots, oldest first, each with `tag`, `step` and `epoch`."""
        with suppress(StoreNotFoundError):
            return list_snapshots(self._run.state)
        return []

    def temperatures(self, at: str = LATEST) -> Temperatures:
        """Return the state of all samples at a tag (`step-200`), a snapshot id, or `latest`.

        Raises RunError if the run has no snapshot yet, SnapshotNotFoundError if it does not have this one.
        """
        return Temperatures(read_run(self._run, at=at, data=self._data))


class Temperatures:
    """The state of all samples at one snapshot: lazy zarr arrays by column, and pandas frames of samples."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection, self._reader, self._dataset = inspection, (reader := inspection.state), inspection.dataset
        self._sample_columns = sample_columns(inspection)
        self.snapshot = reader.snapshot
        self.samples = reader.samples
        """Their ids are 0 … samples - 1."""
        self.sides = inspection.sides
        """`image` and `text` for pairs, else `sample`; empty without tau."""
        self.columns = (*self._sample_columns, *reader.columns)
        """Columns of a frame: the samples table's (none without the dataset), the fields, `visits`, `last_step`.
        `frame` has `kind` only if it is named."""
        self.tau = {side: self.array(f"{side}/tau") for side in self.sides}
        """Side -> zarr array, float32 [samples]."""

    def array(self, column: str) -> zarr.Array[Any] | Scattered:
        """Return one column of the state, float32 or uint32 [samples]; chunks are read as it is indexed.

        A zarr array, or what can be indexed like one if the run trains on selected samples. Raises FieldError.
        """
        return self._reader.array(column)

    def frame(self, sample_ids: slice | ArrayLike | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return rows of samples in the given order, indexed by sample_id; by default all columns of all samples.

        sample_ids: a slice, a range or a sequence of ids. columns: of `columns`, and `kind`, by the state
        alone. Reads only the blocks of the state and the shards of the samples table that hold them. The frame is held
        in memory: 4 bytes per column of the state, 8 for the id, plus texts; for very many samples, name the columns
        needed, or use `frames`.
        Raises SampleIdError for an invalid id, FieldError for an unknown column, DamagedChunkError, DatasetError.
        """
        import pandas as pd

        names = list(self.columns if columns is None else columns)
        if unknown := [name for name in names if name not in (*self.columns, KIND)]:
            known = [*self.columns, KIND]
            raise FieldError(f"no such column: {', '.join(map(repr, unknown))}; the columns are {known}")
        ids = self._checked(sample_ids)
        needed = self._rules.columns if KIND in names else []
        state = self._reader.rows_at(ids, dict.fromkeys([*needed, *(set(names) & {*self._reader.columns})]))
        frame = pd.DataFrame(state, index=pd.RangeIndex(len(ids)))
        if KIND in names:
            frame[KIND] = np.array(KIND_NAMES, object)[self._rules.kinds(state, ids)]
        from_table = [name for name in names if name in self._sample_columns]
        if self._dataset and from_table:
            frame = frame.join(self._dataset.take(ids, from_table).to_pandas())
        # Last, because repeated ids cannot be joined on.
        frame.index = pd.Index(ids, name=SAMPLE_ID)
        return frame[names]

    @cached_property
    def _rules(self) -> KindRules:
        return KindRules.of(self._inspection)

    def frames(self, columns: Sequence[str] | None = None, rows: int = STATE_ROWS_AT_ONCE) -> Iterator[pd.DataFrame]:
        """Yield all samples, ordered by id, as frames of `rows` rows; the last may be shorter."""
        for start in range(0, self.samples, rows):
            yield self.frame(slice(start, start + rows), columns)

    def _checked(self, sample_ids: slice | ArrayLike | None) -> Int64s:
        if sample_ids is None or isinstance(sample_ids, slice):
            return np.arange(*(sample_ids or slice(None)).indices(self.samples), dtype=np.int64)
        ids = np.asarray(sample_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            cure = "pass a slice, or a sequence of integers (for a mask, np.flatnonzero(mask))"
            raise SampleIdError(f"sample ids are {ids.dtype} of shape {ids.shape}; {cure}")
        if ids.size and not 0 <= ids.min() <= ids.max() < self.samples:
            known = f"the run has 0 to {self.samples - 1}"
            raise SampleIdError(f"sample ids {ids.min()} to {ids.max()} are out of range; {known}")
        return ids.astype(np.int64)
