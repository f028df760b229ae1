"""A run with more samples than the run it starts from: `--init-from RUN --grow`."""

from ...pipeline.dataset import Dataset
from ...state_store import StateReader
from ..checkpoints.checkpoint_files import read_info
from ..config import TrainConfig
from ..encoders.initial_weights import parts_of
from ..errors import ConfigError
from ..objectives import Objective
from ..run_directory import RunDirectory


def state_to_grow(config: TrainConfig, dataset: Dataset, objective: Objective) -> StateReader:
    """Return the state of `init_from`, the initial state of the dataset's first samples.

    Raises ConfigError unless the dataset is that run's, or grew from it by appending, and both keep the same fields;
    RunError and StateStoreError if the state cannot be read.
    """
    path, step = parts_of(config.init_from)
    run = RunDirectory(path)
    reader = StateReader.open(run.state, at=read_info(run.checkpoints / str(step)).snapshot)
    if reader.selection is not None or config.data.select:
        raise ConfigError("--grow carries the state of all samples, and one of the runs selects some; leave it out")
    known = {**dataset.index.predecessors, dataset.index.fingerprint: dataset.n}
    if known.get(reader.dataset_fingerprint) != reader.samples:
        raise ConfigError(
            f"--grow: {dataset.place} did not grow from the dataset of {path}, whose samples are others; "
            "append to that dataset (thermopile convert … --append), or leave out --grow"
        )
    if set(reader.fields) != set(objective.fields):
        raise ConfigError(
            f"--grow: {path} keeps {', '.join(reader.fields)} for each sample, but this run's objective "
            f"{', '.join(objective.fields) or 'nothing'}; use that run's objective"
        )
    return reader
