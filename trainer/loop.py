"""The run: everything built from its settings, then the loop over epochs and steps."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..pipeline.augment import RECIPES
from ..pipeline.batch import Batch
from ..pipeline.dataset import Dataset
from ..pipeline.ffcv_loader import FFCVLoader
from ..pipeline.order import ORDER_VERSION, Order
from ..state_store import StateStore, StoreNotFoundError
from .checkpoint import CheckpointInfo, latest_checkpoint, load_checkpoint, save_checkpoint
from .config import DataConfig, TrainConfig, to_toml
from .encoders import Encoders, with_names
from .errors import ConfigError, RunError
from .metrics_log import MetricsLog
from .objectives import Objective, Progress, create_objective
from .optim import create_optimizer, learning_rate, set_learning_rate
from .run_directory import RunDirectory

LOADERS = {"ffcv": FFCVLoader}


@dataclass(frozen=True)
class StepReport:
    """What a person wants to know of the steps since the last report."""

    step: int
    """Steps made."""
    total_steps: int
    epoch: int
    loss: float
    """Of the last step."""
    tau_mean: float | None
    """Mean temperature of the last batch, over its sides; None where the objective has none."""
    samples_per_second: float
    data_wait: float
    """Share of the time spent waiting for the loader, 0 … 1."""
    store_wait: float
    """Share of the time spent waiting for the state store, 0 … 1."""


class Trainer:
    """One run, ready to step. Build it with `open`, which also resumes; `run` trains to the end.

    Everything that decides a result is a function of the settings and the step, so a resumed run repeats nothing and
    skips nothing.
    """

    def __init__(self, config: TrainConfig, run: RunDirectory, dataset: Dataset) -> None:
        torch.manual_seed(config.seed)
        self.config, self.run_directory, self.dataset = config, run, dataset
        self.device = _device(config.device)
        self.mode = config.objective.mode
        self.order = _order(config, dataset)
        tokenizer = dataset.index.tokenizer
        self.encoders = Encoders.create(config.model, self.mode, config.data.image_size, tokenizer).to(self.device)
        self.objective = _objective(config).to(self.device)
        self.optimizer = create_optimizer(config.optimizer, self.encoders, self.objective)
        self.loader = _open_loader(config.data, dataset, self.order, self.mode)
        self.total_steps = config.epochs * self.order.steps_per_epoch
        self.steps_done = 0
        self._resources = ExitStack()
        self._resources.enter_context(self.loader)
        self._saved_at = time.monotonic()
        self._data_wait = self._store_wait = 0.0

    @classmethod
    def open(cls, config: TrainConfig, run: RunDirectory, *, resume: bool = False) -> Trainer:
        """Start a run with resolved settings (`resolve`), or continue it from its latest checkpoint.

        Nothing is written before everything that the settings ask for was built.
        Raises ConfigError, RunError, DatasetError, StateStoreError.
        """
        trainer = cls(config, run, Dataset(Path(config.data.path)))
        if not resume:
            run.create(config)
        try:
            trainer._open_state(latest_checkpoint(run.checkpoints) if resume else None)
        except BaseException:
            trainer.close()
            raise
        return trainer

    def _open_state(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            self.store = self._resources.enter_context(self._new_store())
        else:
            info, training = load_checkpoint(checkpoint, self.device)
            if info.order_version != ORDER_VERSION:
                raise RunError(f"{checkpoint} was made with sample order {info.order_version}, but this thermopile has "
                               f"order {ORDER_VERSION}; resume it with the version that started it")  # fmt: skip
            self.store = self._resources.enter_context(
                StateStore.open(self.run_directory.state, at=info.snapshot, **self._store_identity())
            )
            self._restore(info, training)
        self.log = self._resources.enter_context(
            MetricsLog(self.run_directory.metrics_file, keep_steps=self.steps_done)
        )

    def _store_identity(self) -> dict[str, Any]:
        return {
            "samples": self.dataset.n,
            "fields": self.objective.fields,
            "dataset_fingerprint": self.dataset.index.fingerprint,
            "device": self.device,
        }

    def _new_store(self) -> StateStore:
        """A store of samples never seen, or what a run killed before its first checkpoint left, taken back to that."""
        try:
            return StateStore.open(self.run_directory.state, at="step-0", **self._store_identity())
        except StoreNotFoundError:
            return StateStore.create(
                self.run_directory.state, block_rows=self.order.block_rows, **self._store_identity()
            )

    def run(self, on_report: Callable[[StepReport], None] = lambda report: None) -> None:
        """Train to the last step. Raises TrainingError where the loss is not finite."""
        reported_at = time.monotonic()
        while self.steps_done < self.total_steps:
            epoch, first_step = divmod(self.steps_done, self.order.steps_per_epoch)
            batches = self.loader.epoch(epoch, first_step)
            while (batch := self._next(batches)) is not None:
                self.step(batch)
                # Once in a while.
                checkpoint_is_due = self._checkpoint_is_due()
                if checkpoint_is_due or self.steps_done % self.config.log_every == 0:
                    now = time.monotonic()
                    on_report(self._report(self.log.flush(), now - reported_at))
                    reported_at = now
                if checkpoint_is_due:
                    self.save()

    def step(self, batch: Batch) -> None:
        """One step: state in, loss, state out, gradients, weights. Nothing here reads a value back from the device."""
        sample_ids, progress = batch.sample_ids, Progress(self.steps_done, self.order.steps_per_epoch)
        began = time.monotonic()
        state = self.store.take(sample_ids)
        self.store.prefetch(self._ids_of_step(self.steps_done + 1))
        self._store_wait += time.monotonic() - began

        first, second = self.encoders(batch.to(self.device))
        outcome = self.objective(first, second, state, progress)

        began = time.monotonic()
        self.store.put(sample_ids, outcome.state, step=self.steps_done + 1)  # returns at once; written during backprop
        self._store_wait += time.monotonic() - began

        rate = learning_rate(self.config.optimizer, self.steps_done, self.total_steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=True)
        outcome.loss.backward()
        self.optimizer.step()
        self.steps_done += 1
        self.log.add(
            {"step": self.steps_done, "epoch": progress.epoch, "loss": outcome.loss, "learning_rate": rate}
            | outcome.metrics
            | {"data_wait_seconds": self._data_wait, "store_wait_seconds": self._store_wait}
            | {"refused_rows": self.store.refused_rows}
        )
        self._data_wait = self._store_wait = 0.0

    def save(self) -> Path:
        """Checkpoint at this step boundary: the state's snapshot first, then the model part that names it."""
        self.log.flush()
        self.log.sync()
        config_hash = hashlib.sha256(to_toml(self.config).encode()).hexdigest()
        epoch = self.steps_done // self.order.steps_per_epoch
        snapshot = self.store.snapshot(self.steps_done, epoch=epoch, config_hash=config_hash).result()
        info = CheckpointInfo(
            step=self.steps_done,
            snapshot=snapshot.id,
            order_version=ORDER_VERSION,
            dataset_fingerprint=self.dataset.index.fingerprint,
        )
        path = save_checkpoint(self.run_directory.checkpoints, info, self._training_state())
        self._saved_at = time.monotonic()
        return path

    def close(self) -> None:
        """End the threads and release the run; what came after the last checkpoint is lost."""
        self._resources.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, batches: Any) -> Batch | None:
        began = time.monotonic()
        batch: Batch | None = next(batches, None)
        self._data_wait += time.monotonic() - began
        return batch

    def _ids_of_step(self, step: int) -> Any:
        epoch, step_of_epoch = divmod(min(step, self.total_steps - 1), self.order.steps_per_epoch)
        return self.order.batch_ids(epoch, step_of_epoch)

    def _checkpoint_is_due(self) -> bool:
        every = self.config.checkpoint
        if self.steps_done == self.total_steps:
            return True
        if every.every_steps and self.steps_done % every.every_steps == 0:
            return True
        return bool(every.every_minutes) and time.monotonic() - self._saved_at >= 60 * every.every_minutes

    def _training_state(self) -> dict[str, Any]:
        state = {
            "encoders": self.encoders.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state()
        return state

    def _restore(self, info: CheckpointInfo, training: dict[str, Any]) -> None:
        self.encoders.load_state_dict(training["encoders"])
        self.objective.load_state_dict(training["objective"])
        self.optimizer.load_state_dict(training["optimizer"])
        torch.set_rng_state(training["rng"].cpu())
        if "cuda_rng" in training and self.device.type == "cuda":
            torch.cuda.set_rng_state(training["cuda_rng"].cpu())
        self.steps_done = info.step

    def _report(self, lines: list[dict[str, float]], seconds: float) -> StepReport:
        last = lines[-1]
        taus = [value for name, value in last.items() if name.endswith("/tau_mean")]
        return StepReport(
            step=self.steps_done,
            total_steps=self.total_steps,
            epoch=int(last["epoch"]),
            loss=last["loss"],
            tau_mean=sum(taus) / len(taus) if taus else None,
            samples_per_second=len(lines) * self.config.batch_size / seconds,
            data_wait=sum(line["data_wait_seconds"] for line in lines) / seconds,
            store_wait=sum(line["store_wait_seconds"] for line in lines) / seconds,
        )


def resolve(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    """Replace every `auto` that a result depends on by what it stands for, and fill in the objective's settings.

    Raises ConfigError where the objective, its mode or a setting of it, or the batch size, does not fit.
    """
    pairs = dataset.index.mode == "pairs"
    mode = config.objective.mode
    if mode == "auto":
        mode = "bimodal" if pairs else "unimodal"
    if mode == "bimodal" and not pairs:
        raise ConfigError(f"objective.mode = 'bimodal' needs captions, but {dataset.path} has pictures alone")
    recipe = config.data.recipe
    if recipe == "auto":
        recipe = "clip" if mode == "bimodal" else "crop_flip"
    resolved = config.model_copy(
        update={
            "data": config.data.model_copy(update={"recipe": recipe, "path": str(dataset.path.resolve())}),
            "objective": config.objective.model_copy(update={"mode": mode}),
            "model": with_names(config.model),
            "canonical_shards": _order(config, dataset).canonical_shards,
        }
    )
    settings = _objective(resolved).settings.model_dump(exclude_none=True)
    full = type(config.objective)(name=resolved.objective.name, mode=mode, **settings)
    return resolved.model_copy(update={"objective": full})


def _order(config: TrainConfig, dataset: Dataset) -> Order:
    try:
        return Order.create(dataset.n, config.batch_size, config.seed, config.canonical_shards or None)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _objective(config: TrainConfig) -> Objective:
    objective = config.objective
    try:
        return create_objective(objective.name, mode=objective.mode, **objective.settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _open_loader(config: DataConfig, dataset: Dataset, order: Order, mode: str) -> FFCVLoader:
    return LOADERS[config.loader].open(
        dataset,
        order,
        recipe=RECIPES[config.recipe],
        image_size=config.image_size,
        views=1 if mode == "bimodal" else 2,
        workers=config.workers or None,
        ahead=config.ahead,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch sees no GPU here; use device = 'cpu' or 'auto'")
    return torch.device(name)
