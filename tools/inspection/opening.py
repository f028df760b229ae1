"""Open a finished or running run read-only, with notes on what is missing, and read its state piece by piece."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...pipeline.errors import DatasetError
from ...pipeline.opening import Dataset, Mixture
from ...state_store.durable import Repository
from ...state_store.errors import StoreNotFoundError
from ...state_store.reader import StateReader
from ...storage.place import Places
from ...trainer.checkpoints.checkpoint_files import latest_checkpoint, read_info
from ...trainer.config import ObjectiveConfig, TrainConfig
from ...trainer.errors import ConfigError, DamagedCheckpointError, RunError
from ...trainer.run.own_dataset import growth, kept_facts, open_own
from ...trainer.run_directory import RunDirectory
from . import AnyArray, Int64s

LATEST = "latest"
STATE_ROWS_AT_ONCE = 1 << 18

Rows = dict[str, AnyArray]
"""Column of the state -> values [m]."""


class OtherDatasetError(DatasetError):
    """The given dataset is neither the run's nor a part of it."""

    def __init__(self, message: str, dataset: Dataset) -> None:
        super().__init__(message)
        self.dataset = dataset


@dataclass(frozen=True)
class Inspection:
    """A run as far as it could be opened. `notes` say why parts are missing."""

    run: RunDirectory
    config: TrainConfig
    reader: StateReader | None
    """The state of all samples at the requested snapshot."""
    dataset: Dataset | None
    notes: list[str]

    @property
    def columns(self) -> tuple[str, ...]:
        return self.reader.columns if self.reader else ()

    @property
    def sides(self) -> tuple[str, ...]:
        """Sides of the state that have a tau: `image` and `text`, or `sample`."""
        fields = self.reader.fields if self.reader else ()
        return tuple(name.removesuffix("/tau") for name in fields if name.endswith("/tau"))

    @property
    def state(self) -> StateReader:
        """The reader. Raises RunError without a snapshot."""
        if self.reader is None:
            raise RunError(f"{self.run.path} has no snapshot of its state yet; the first checkpoint writes one")
        return self.reader

    @property
    def settings(self) -> dict[str, Any]:
        """The objective's."""
        return self.config.objective.settings

    @cached_property
    def planted(self) -> tuple[Int64s, Int64s]:
        """Ids of the samples trained with another sample's caption, ascending, and of those samples, int64 [k] each."""
        if not self.config.data.planted or self.dataset is None or self.reader is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        from ...pipeline.planted import Planting  # numba takes a second to import

        return Planting(self.dataset, self.config.seed, self.config.data.planted, self.reader.selection).all()


def read_run(run: RunDirectory, *, at: str = LATEST, data: Places | None = None) -> Inspection:
    """Open a run's state at a tag, a snapshot id or `latest`, and its dataset.

    data: path of the dataset; None: the path recorded by the run. A state without a snapshot, or an unreadable dataset
    at the recorded path, adds a note. Raises RunError if `run` is not a run or its state is another run's,
    StateStoreError if the requested snapshot is missing, OtherDatasetError if `data` is not the run's dataset.
    """
    config = run.config()
    notes: list[str] = []
    reader = _open_state(run, config.objective, at, notes)
    return Inspection(run, config, reader, _open_dataset(run, config, reader, data, notes), notes)


def _open_state(run: RunDirectory, objective: ObjectiveConfig, at: str, notes: list[str]) -> StateReader | None:
    _check_own_state(run)
    if at == LATEST and not run.has_state:
        notes.append("The run has no snapshot of its state yet, so no temperatures; its first checkpoint writes one.")
        return None
    reader = StateReader.open(run.state, at)
    if reader.selection is not None:
        reader.selection.verify()
        if holes := reader.selection.about.holes:
            notes.append(f"Samples that the run leaves out (--without), also left out here: {holes:,}.")
    if not any(name.endswith("/tau") for name in reader.fields):
        notes.append(f"Objective {objective.name} has no temperature per sample, so no temperatures are shown.")
    return reader


def _check_own_state(run: RunDirectory) -> None:
    """Raise RunError if the run's latest checkpoint names a snapshot that its state does not have."""
    if (latest := latest_checkpoint(run.checkpoints)) is None:
        return
    try:
        named = read_info(latest).snapshot
        is_there = run.has_state and Repository(run.state).holds(named)
    except (DamagedCheckpointError, StoreNotFoundError):
        return  # nothing to compare the state with
    if not is_there and latest_checkpoint(run.checkpoints) == latest:  # otherwise the run has moved on meanwhile
        why = f"{latest.name} belongs to the snapshot {named}, which is missing"
        cure = "Restore the run's own state, or inspect the run that this state belongs to"
        raise RunError(f"{run.state} is not this run's state: {why}. {cure}")


def _open_dataset(
    run: RunDirectory, config: TrainConfig, reader: StateReader | None, data: Places | None, notes: list[str]
) -> Dataset | None:
    try:
        dataset = open_own(run, data or config.data.places, config.data.tars)
        place, fingerprint = dataset.place, dataset.index.fingerprint
        if reader and fingerprint != reader.dataset_fingerprint:
            why = f"its fingerprint is {fingerprint[:12]}…, the state has {reader.dataset_fingerprint[:12]}…"
            cure = "Of a mixture, pass --data for each part, in order"
            message = f"{place} is not the dataset that the run was trained on: {why}. {cure}"
            parts, own = dataset.parts if isinstance(dataset, Mixture) else (dataset,), kept_facts(run)
            if own and {part.index.fingerprint for part in parts} & {*own.fingerprints}:
                raise DatasetError(message)
            raise OtherDatasetError(message, dataset)
        if reader and dataset.n != reader.samples:
            raise DatasetError(f"{place} holds {dataset.n:,} samples, the state {reader.samples:,}: one is damaged")
    except (DatasetError, OSError) as error:
        if data is not None:
            raise
        notes.append(f"The run's dataset cannot be used, so there are no classes and no pictures: {error}")
        return None
    notes += growth(run, config, dataset)
    if dataset.index.mode == "images":
        notes.append("The samples have no captions: the dataset holds images only.")
    return dataset


def check_ids(sample_ids: Iterable[int], samples: int) -> None:
    """Raise ConfigError unless all are ids of a run's samples."""
    if unknown := [str(id) for id in sample_ids if not 0 <= id < samples]:
        known = f"the run has {samples:,} samples, with ids 0 … {samples - 1}"
        raise ConfigError(f"no such sample: {', '.join(unknown)}; {known}")


def pieces(reader: StateReader) -> list[range]:
    """Return ranges of ids in whole blocks of the state, about 262,144 ids each."""
    step = max(1, STATE_ROWS_AT_ONCE // reader.block_rows) * reader.block_rows
    return [range(start, min(start + step, reader.samples)) for start in range(0, reader.samples, step)]


def read_blocks(reader: StateReader, columns: Sequence[str]) -> Iterator[tuple[range, Rows]]:
    """Read columns of a snapshot piece by piece. Raises DamagedChunkError, SnapshotNotFoundError."""
    for piece in pieces(reader):
        yield piece, reader.rows(piece.start, piece.stop, columns)
