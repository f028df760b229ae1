"""What a finished or running run left behind, read for looking at: settings, state, dataset, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..pipeline.dataset import Dataset
from ..pipeline.errors import DatasetError
from ..state_store import Snapshot, SnapshotNotFoundError, StateReader, StoreNotFoundError
from ..trainer.config import ObjectiveConfig, TrainConfig
from ..trainer.run_directory import RunDirectory

_LATEST = "latest"
_LABELS = {"first": "image", "second": "text"}
"""What the sides of pairs are; `sample`, the one side of images, is called so by people as well."""


@dataclass(frozen=True)
class RunState:
    """The state of all n samples at one snapshot."""

    snapshot: Snapshot
    dataset_fingerprint: str
    visited: NDArray[np.bool_]
    """bool [n]; the tau of a sample never visited stands at tau_init and says nothing."""
    tau: dict[str, NDArray[np.float32]]
    """By side, float32 [n]; empty where the objective keeps no temperature per sample."""
    labels: dict[str, str]
    """By side, its name for people."""
    tau_init: float | None
    tau_min: float | None
    tau_max: float | None
    """Where every tau starts and the bounds it is held to, where the objective has them."""

    @property
    def samples(self) -> int:
        return len(self.visited)

    @property
    def share_visited(self) -> float:
        return float(self.visited.mean())


@dataclass(frozen=True)
class Inspection:
    """A run as far as it could be read. `notes` say in plain words why a part is missing."""

    run: RunDirectory
    config: TrainConfig
    state: RunState | None
    dataset: Dataset | None
    notes: list[str]


def read_run(run: RunDirectory, *, at: str = _LATEST, data: Path | None = None) -> Inspection:
    """Read a run's state as it was at a tag, a snapshot id or `latest`, and open its dataset.

    data: where the dataset is now; None: where the run found it. A state that has no snapshot yet, or a dataset that
    cannot be read where the run found it, is noted.
    Raises RunError where `run` is none, StateStoreError where the snapshot asked for is missing, DatasetError where
    `data` is not the run's dataset.
    """
    config = run.config()
    notes: list[str] = []
    state = _read_state(run, config.objective, at, notes)
    dataset = _open_dataset(config, state, data, notes)
    return Inspection(run, config, state, dataset, notes)


def _read_state(run: RunDirectory, objective: ObjectiveConfig, at: str, notes: list[str]) -> RunState | None:
    try:
        reader = StateReader.open(run.state, at)
    except (StoreNotFoundError, SnapshotNotFoundError):
        if at != _LATEST:
            raise
        notes.append("The run has no snapshot of its state yet, so there are no temperatures; its first checkpoint "
                     "will write one.")  # fmt: skip
        return None
    tau = {name.removesuffix("/tau"): reader.column(name) for name in reader.fields if name.endswith("/tau")}
    state = RunState(
        snapshot=reader.snapshot,
        dataset_fingerprint=reader.dataset_fingerprint,
        visited=reader.column("visits") > 0,
        tau=tau,
        labels={side: _LABELS.get(side, side) for side in tau},
        tau_init=objective.settings.get("tau_init"),
        tau_min=objective.settings.get("tau_min"),
        tau_max=objective.settings.get("tau_max"),
    )
    if not tau:
        notes.append(f"The objective {objective.name} keeps no temperature per sample, so there is none to show.")
    elif not state.visited.any():
        notes.append(f"No sample was visited up to {reader.snapshot.tag}: every tau still stands at its start.")
    return state


def _open_dataset(config: TrainConfig, state: RunState | None, data: Path | None, notes: list[str]) -> Dataset | None:
    path = data or Path(config.data.path)
    try:
        dataset = Dataset(path)
        if state and dataset.index.fingerprint != state.dataset_fingerprint:
            raise DatasetError(
                f"{path} is not the dataset that the run was trained on: its fingerprint is "
                f"{dataset.index.fingerprint[:12]}…, the state has {state.dataset_fingerprint[:12]}…"
            )
    except (DatasetError, OSError) as error:
        if data is not None:
            raise
        notes.append(f"The run's dataset cannot be used, so there are no classes and no pictures: {error} "
                     "Say with --data where it is now.")  # fmt: skip
        return None
    if dataset.index.mode == "images":
        notes.append("The samples have no captions: the dataset holds images alone.")
    return dataset
