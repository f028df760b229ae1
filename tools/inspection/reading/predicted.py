"""Inspect a dataset that a run was not trained on, by the temperatures that the run's objective predicts for it.

They are written as the only snapshot of a temporary state, so that everything reads them as it reads a run's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from ....pipeline.dataset import Dataset
from ....pipeline.errors import DatasetError
from ....pipeline.mixture import open_dataset
from ....state_store import SnapshotError, StateReader
from ....state_store.commit import ColumnPart
from ....state_store.durable import Repository
from ....state_store.ranks import Ranks
from ....state_store.schema import LAST_STEP, VISITS, Description, Schema
from ....storage.local import LocalPath
from ....storage.place import Places
from ....trainer.errors import ConfigError, RunError
from ....trainer.run.own_dataset import open_own
from ....trainer.run_directory import RunDirectory
from .opening import Inspection, Prediction
from .state_blocks import ROWS_AT_ONCE

if TYPE_CHECKING:
    from ....trainer.evaluation.prediction import Predictor


def other_dataset(run: RunDirectory, data: Places | None, *, allow_code: bool) -> Dataset | None:
    """Return the dataset `data` if it is not the run's own and the run's objective predicts temperatures, else None.

    allow_code: whether the objective may be a user's own, which is then imported.
    Raises RunError if `run` is not a run, DatasetError if `data` is not a dataset.
    """
    config = run.config()
    if data is None or not run.has_state:
        return None
    if open_own(run, data, pictures=False).index.fingerprint == StateReader.open(run.state).dataset_fingerprint:
        return None
    dataset = open_dataset(data)
    from ....trainer.evaluation.prediction import predicts  # imports torch, which an inspection does not need

    return dataset if predicts(config, allow_code=allow_code) else None


def refuse_other_dataset(option: str, run: RunDirectory, data: Places | None, *, allow_code: bool = False) -> None:
    """Raise ConfigError if temperatures would be predicted for `data`. option: what cannot be had for another."""
    if other_dataset(run, data, allow_code=allow_code):
        raise ConfigError(
            f"{option} is for the dataset that the run was trained on; leave it out to see temperatures "
            "predicted for another"
        )


def predict(
    run: RunDirectory, dataset: Dataset, at: str, *, allow_code: bool, on_progress: Callable[[int], None]
) -> Inspection:
    """Return an inspection of the dataset with temperatures predicted by a checkpoint, `latest` or step-N.

    Memory does not grow with the samples: their temperatures are on disk until the inspection is released.
    Calls on_progress with the number of samples done. Raises as Predictor does.
    """
    from ....trainer.evaluation.prediction import Predictor

    predictor = Predictor.restore(run, at, allow_code=allow_code)
    with ExitStack() as folder:
        path = Path(folder.enter_context(TemporaryDirectory(prefix="thermopile-"))) / "state"
        _write(path, predictor, dataset, on_progress)
        reader = StateReader.open(path)
        finalize(reader, folder.pop_all().close)
    notes = [
        f"Temperatures predicted for {dataset.place}, which the run was not trained on, by "
        f"{predictor.checkpoint.name}; no step has updated them."
    ]
    if dataset.index.mode == "images":
        notes.append("The samples have no captions: the dataset holds images only.")
    return Inspection(run, predictor.config, reader, dataset, notes, Prediction(predictor.checkpoint.name))


def _write(path: Path, predictor: Predictor, dataset: Dataset, on_progress: Callable[[int], None]) -> None:
    """Write a state at `path` whose last snapshot has the predicted temperatures of the dataset."""
    step, fingerprint = max(1, predictor.info.step), dataset.index.fingerprint
    fields = {f"{side}/tau": 0.0 for side in predictor.sides(dataset)}
    description = Description(dataset.n, Schema(fields), min(dataset.n, ROWS_AT_ONCE), fingerprint)
    repository = Repository.create(LocalPath(path), description)
    parts = _parts(predictor, dataset, description, step, on_progress)
    about: dict[str, Any] = {"epoch": 0, "config_hash": "", "dataset_fingerprint": fingerprint}
    try:
        repository.commit(lambda _: parts, base=repository.resolve("latest"), step=step, ranks=Ranks(), **about)
    except SnapshotError as error:
        raise _cause(error) from error


def _parts(
    predictor: Predictor, dataset: Dataset, description: Description, step: int, on_progress: Callable[[int], None]
) -> Iterator[ColumnPart]:
    """Yield whole blocks of predicted rows; they count as visited, because the figures leave out what was not."""
    start, held, pending = 0, 0, []
    for batch in predictor.batches(dataset):
        pending.append(batch)
        held += len(next(iter(batch.values())))
        on_progress(start + held)
        if held == description.block_rows or start + held == dataset.n:
            columns = {f"{side}/tau": np.concatenate([batch[side] for batch in pending]) for side in pending[0]}
            counters = {VISITS: np.ones(held, np.uint32), LAST_STEP: np.full(held, step, np.uint32)}
            yield ColumnPart(start, columns | counters)
            start, held, pending = start + held, 0, []


def _cause(error: BaseException) -> BaseException:
    """Return the error of the dataset or the encoders that ended the writing, or else the error itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DatasetError | RunError):
        cause = cause.__cause__
    return cause or error
