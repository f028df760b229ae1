"""Measure a training step: the real trainer, on random batches that lie on the device or on a dataset's own."""

import hashlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ...pipeline.dataset.index import (
    INDEX_FILE,
    SHARD_FOLDER,
    SHARD_SUFFIXES,
    TOKENIZER_FILE,
    TokenizerInfo,
    seal_index,
    shard_name,
)
from ...pipeline.opening import Dataset
from ...trainer.config import TrainConfig, load_config
from ...trainer.config.layers import merge
from ...trainer.errors import ConfigError
from ...trainer.loop import Trainer
from ...trainer.metrics.step_report import TIME, split
from ...trainer.run.build import resolve
from ...trainer.run.chosen_settings import USUAL_BATCH_SIZE
from ...trainer.run_directory import RunDirectory

WARM_UP = 10
"""Steps that are not counted: torch initialises itself, and a loader fills what it keeps ready."""
TOKENIZER = TokenizerInfo(vocab_size=49_408, context_length=32, end_id=49_407)
"""CLIP's vocabulary, and the length of captions that a conversion has by default."""


@dataclass(frozen=True)
class StepCost:
    """A step of one configuration."""

    image: str
    text: str | None
    """The text encoder's name; None without one."""
    device: str
    loader: str
    """synthetic, or what loaded the dataset's own batches."""
    batch_size: int
    parameters: int
    step_ms: float
    """Mean, with the wait for the batch."""
    samples_per_second: float
    shares: dict[str, float]
    """Parts of the steps' time, 0 … 1: data_wait, forward_backward, …, as `thermopile status` has them."""
    peak_gpu_bytes: int | None
    """Most memory that torch had on the GPU; None on a CPU."""


def costs_of(
    dataset: Dataset, settings: Mapping[str, Any], loaders: Iterable[str], steps: int, directory: Path
) -> tuple[list[StepCost], str]:
    """Return the cost of a step with synthetic data and with each loader, and why the list ends early, or "".

    Raises ConfigError if the settings do not fit.
    """
    costs: list[StepCost] = []
    for loader in ("synthetic", *loaders):
        own = deepcopy(dict(settings))
        merge(own, {"data": {"loader": loader}})
        with TemporaryDirectory(dir=directory) as run:
            try:
                costs.append(step_cost(complete(dataset, own), steps, Path(run)))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return costs, f"out of memory with {loader} data; use a smaller batch"
            except ConfigError as error:
                if loader == "synthetic":
                    raise
                return costs, str(error)  # its package is missing
    return costs, ""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that the GPU's memory is full, for which its libraries have words of their own."""
    own_words = ("unable to find an engine", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in own_words)


def step_cost(config: TrainConfig, steps: int, directory: Path) -> StepCost:
    """Train `steps` steps in `directory` after those of WARM_UP, without evaluations, and return the cost of one.

    config: complete settings. Writes no checkpoint. Raises ConfigError as Trainer does, and torch.OutOfMemoryError.
    """
    steps += WARM_UP
    few = config.model_copy(update={"trackers": (), "steps": steps, "epochs": steps})  # in as many epochs as it takes
    with Trainer.open(few, RunDirectory(directory / "run")) as trainer:
        run = trainer.run
        on_gpu = run.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for pieces in islice(run.steps(), steps):
            trainer.step(pieces)
        lines = run.flush_log()[WARM_UP:]
        # A GPU lags behind by the same few steps at the first and at the last line, so their mean is what it takes.
        seconds = sum(line[TIME] for line in lines) / len(lines)
        return StepCost(
            image=config.model.image.name,
            text=config.model.text.name if run.encoders.text else None,
            device=str(run.device),
            loader=config.data.loader,
            batch_size=config.batch_size,
            parameters=sum(each.numel() for each in run.encoders.parameters() if each.requires_grad),
            step_ms=1e3 * seconds,
            samples_per_second=config.batch_size / seconds,
            shares=split(lines),
            peak_gpu_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        )


def complete(dataset: Dataset, settings: Mapping[str, Any], steps: int = 1) -> TrainConfig:
    """Return complete settings of a run of at least `steps` steps. Raises ConfigError if they do not fit."""
    tree = {**settings, "data": {**settings.get("data", {}), "path": dataset.absolute}}
    tree["epochs"] = 1 + 2 * steps * (load_config(tree).batch_size or USUAL_BATCH_SIZE) // dataset.n
    return resolve(load_config(tree), dataset)[0]


def open_trainer(dataset: Dataset, settings: Mapping[str, Any], steps: int, directory: Path) -> Trainer:
    """Return a trainer at the start of a run of at least `steps` steps in `directory`/run."""
    return Trainer.open(complete(dataset, settings, steps), RunDirectory(directory / "run"))


def synthetic_dataset(path: Path, samples: int) -> Dataset:
    """Write a dataset of pairs to `path`, for data.loader = "synthetic": it has neither their pictures nor captions."""
    (path / SHARD_FOLDER).mkdir(parents=True)
    nothing = hashlib.sha256(b"").hexdigest()
    for suffix in SHARD_SUFFIXES:
        (path / SHARD_FOLDER / shard_name(0, suffix)).touch()
    (path / TOKENIZER_FILE).touch()
    index: dict[str, Any] = {
        "n": samples,
        "mode": "pairs",
        "captions_per_sample": 1,
        "first_id": [0, samples],
        "image": {},
        "tokenizer": TOKENIZER.model_dump(),
        "tokenizer_digest": nothing,
        "shard_digests": [dict.fromkeys(SHARD_SUFFIXES, nothing)],
        "grown_from": None,
        "source": {"kind": "synthetic"},
    }
    (path / INDEX_FILE).write_bytes(seal_index(index))
    return Dataset(path)
