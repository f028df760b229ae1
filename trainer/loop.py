"""The run: the loop over epochs and steps, its checkpoints and its log."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..pipeline.batch import Batch
from ..pipeline.dataset import Dataset
from ..pipeline.order import ORDER_VERSION
from ..state_store import SnapshotError, StateStore, StateStoreError, list_snapshots
from .checkpoint import (
    CheckpointInfo,
    latest_checkpoint,
    load_latest,
    remove_checkpoints,
    retained_steps,
    save_checkpoint,
)
from .config import TrainConfig, to_toml
from .encoders import Encoders
from .errors import NotFiniteError, RunError, TrainingError
from .metrics_log import MetricsLog
from .objectives import FeaturesError, Outcome, Progress
from .optim import create_optimizer, learning_rate
from .parts import create_order, device_named, objective_of, open_loader, windows_from
from .run_directory import RunDirectory

RETRY_SECONDS = 60.0
"""Time from a checkpoint that could not be written to the next attempt."""

FIRST_IDS = 8
"""So many samples of a batch are named where it ends the run."""

_log = logging.getLogger(__name__)


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
    """Mean temperature of the last batch, over its sides, or the global one; None where it is not learned."""
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
        self.device = device_named(config.device)
        self.mode = config.objective.mode
        tokenizer = dataset.index.tokenizer
        self.encoders = Encoders.create(config.model, self.mode, config.data.image_size, tokenizer).to(self.device)
        self.objective = objective_of(config).to(self.device)
        self.order = create_order(config, dataset, self.objective)
        self.optimizer = create_optimizer(config.optimizer, self.encoders, self.objective)
        self.loader = open_loader(config.data, dataset, self.order, self.mode, self.device)
        self.total_steps = config.epochs * self.order.steps_per_epoch
        self.steps_done = 0
        self._resources = ExitStack()
        self._resources.enter_context(self.loader)
        self._saved_at = time.monotonic()
        self._retry_at: float | None = None  # set where the last checkpoint could not be written
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
            trainer._open_state(load_latest(run.checkpoints) if resume else None)
        except BaseException:
            trainer.close()
            raise
        return trainer

    def _open_state(self, loaded: tuple[Path, CheckpointInfo, dict[str, Any]] | None) -> None:
        if loaded is None:
            self.store = self._resources.enter_context(self._new_store())
        else:
            checkpoint, info, training = loaded
            if info.order_version != ORDER_VERSION:
                raise RunError(f"{checkpoint} was made with sample order {info.order_version}, but this thermopile has "
                               f"order {ORDER_VERSION}; resume it with the version that started it")  # fmt: skip
            self.store = self._resources.enter_context(
                StateStore.open(self.run_directory.state, at=info.snapshot, **self._store_settings())
            )
            self._restore(checkpoint, info, training)
        self.store.expect(windows_from(self.steps_done, self.order, self.config.epochs))
        self._prefetched = self.steps_done + 1  # steps before this one need no prefetch any more
        self.log = self._resources.enter_context(
            MetricsLog(self.run_directory.metrics_file, keep_steps=self.steps_done)
        )

    def _store_settings(self) -> dict[str, Any]:
        return {
            "samples": self.dataset.n,
            "fields": self.objective.fields,
            "dataset_fingerprint": self.dataset.index.fingerprint,
            "device": self.device,
            "memory_budget": self.config.state.memory_budget,
        }

    def _new_store(self) -> StateStore:
        """A store of samples never seen, or what a run killed before its first checkpoint left, taken back to that."""
        if self.run_directory.state.exists():
            return StateStore.open(self.run_directory.state, at="step-0", **self._store_settings())
        return StateStore.create(self.run_directory.state, block_rows=self.order.block_rows, **self._store_settings())

    def run(
        self,
        on_report: Callable[[StepReport], None] = lambda report: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train to the last step, or to the first after which should_stop says so, which is asked after every step.

        A checkpoint that cannot be written, as on a full disk, is warned of and tried again; only the last one must
        succeed. Raises TrainingError where the loss is not finite, and SnapshotError or OSError at the end.
        """
        reported_at = time.monotonic()
        while self.steps_done < self.total_steps:
            epoch, first_step = divmod(self.steps_done, self.order.steps_per_epoch)
            batches = self.loader.epoch(epoch, first_step)
            while (batch := self._next(batches)) is not None:
                self.step(batch)
                is_last = self.steps_done == self.total_steps or should_stop()
                # Once in a while.
                checkpoint_is_due = is_last or self._checkpoint_is_due()
                if checkpoint_is_due or self.steps_done % self.config.log_every == 0:
                    now = time.monotonic()
                    on_report(self._report(self._flushed_log(), now - reported_at))
                    reported_at = now
                if checkpoint_is_due:
                    self._save_now_or_later(must_succeed=is_last)
                if is_last:
                    return

    def step(self, batch: Batch) -> None:
        """One step: state in, loss, state out, gradients, weights. Nothing here reads a value back from the device."""
        sample_ids, progress = batch.sample_ids, Progress(self.steps_done, self.order.steps_per_epoch)
        began = time.monotonic()
        state = self.store.take(sample_ids)
        self._store_wait += time.monotonic() - began
        self._prefetch()

        first, second = self.encoders(batch.to(self.device))
        outcome = self._outcome(first, second, state, progress)

        began = time.monotonic()
        self.store.put(sample_ids, outcome.state, step=self.steps_done + 1)  # returns at once; written during backprop
        self._store_wait += time.monotonic() - began

        rate = learning_rate(self.config.optimizer, self.steps_done, self.order.steps_per_epoch, self.total_steps)
        self.optimizer.set_learning_rate(rate)
        self.optimizer.zero_grad()
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.steps_done += 1
        scalars: dict[str, Tensor | float] = {"step": self.steps_done, "epoch": progress.epoch, "loss": outcome.loss}
        waits = {"data_wait_seconds": self._data_wait, "store_wait_seconds": self._store_wait}
        self.log.add(
            scalars | {"learning_rate": rate} | outcome.metrics | waits | {"refused_rows": self.store.refused_rows}
        )
        self._data_wait = self._store_wait = 0.0

    def _outcome(self, first: Tensor, second: Tensor, state: Mapping[str, Tensor], progress: Progress) -> Outcome:
        try:
            outcome: Outcome = self.objective(first, second, state, progress)
        except FeaturesError as error:
            self._flushed_log()  # the loss of a step before may be the cause
            raise self._cannot_go_on(self.steps_done + 1, f"step {self.steps_done + 1:,}: {error}") from error
        return outcome

    def _flushed_log(self) -> list[dict[str, float]]:
        try:
            return self.log.flush()
        except NotFiniteError as error:
            raise self._cannot_go_on(error.step, str(error)) from error

    def _cannot_go_on(self, step: int, why: str) -> TrainingError:
        """What to raise for values that are not finite: whose they are, and what is left."""
        sample_ids = self.order.batch_ids(*divmod(step - 1, self.order.steps_per_epoch)).tolist()
        first = ", ".join(map(str, sample_ids[:FIRST_IDS]))
        last = latest_checkpoint(self.run_directory.checkpoints)
        left = f"The last checkpoint, {last}, is from before it" if last else "There is no checkpoint before it"
        return TrainingError(
            f"{why}. Its {len(sample_ids)} samples begin with the ids {first}: look whether they are damaged. {left}. "
            "If they are not, lower the learning rate in a new run"
        )

    def save(self) -> Path:
        """Checkpoint at this step boundary: the state's snapshot first, then the model part that names it.

        Raises SnapshotError or OSError where either cannot be written; the last checkpoint then stands.
        """
        self._flushed_log()
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
        self._saved_at, self._retry_at = time.monotonic(), None
        self._remove_old_checkpoints()
        return path

    def _save_now_or_later(self, *, must_succeed: bool) -> None:
        try:
            self.save()
        except (SnapshotError, OSError) as error:
            if must_succeed:
                raise
            self._retry_at = time.monotonic() + RETRY_SECONDS
            _log.warning(
                "the checkpoint of step %d was not written: %s. Training goes on; next attempt in %.0f seconds",
                self.steps_done, error, RETRY_SECONDS,
            )  # fmt: skip

    def _remove_old_checkpoints(self) -> None:
        """Remove checkpoints, then the snapshots that they name; never the one that `latest` names, just written."""
        keep = self.config.checkpoint
        try:
            snapshots = (snapshot.step for snapshot in list_snapshots(self.run_directory.state))
            kept = retained_steps(snapshots, keep.keep_last, keep.keep_every) | {self.steps_done}
            remove_checkpoints(self.run_directory.checkpoints, keep=kept)
            self.store.retain(keep.keep_last, keep.keep_every).result()
        except (StateStoreError, OSError) as error:
            _log.warning("old checkpoints could not be removed: %s. The next checkpoint tries again", error)

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

    def _prefetch(self) -> None:
        """Let the store gather the rows of the coming steps, those of each step once."""
        end = min(self.steps_done + 1 + self.config.state.prefetch_steps, self.total_steps)
        for step in range(self._prefetched, end):
            sample_ids = self.order.batch_ids(*divmod(step, self.order.steps_per_epoch))
            began = time.monotonic()  # computing the order is not the store's time
            self.store.prefetch(sample_ids)
            self._store_wait += time.monotonic() - began
        self._prefetched = end

    def _checkpoint_is_due(self) -> bool:
        every = self.config.checkpoint
        if self._retry_at is not None:
            return time.monotonic() >= self._retry_at
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

    def _restore(self, checkpoint: Path, info: CheckpointInfo, training: dict[str, Any]) -> None:
        try:
            self.encoders.load_state_dict(training["encoders"])
            self.objective.load_state_dict(training["objective"])
            self.optimizer.load_state_dict(training["optimizer"])
            torch.set_rng_state(training["rng"])
            if "cuda_rng" in training and self.device.type == "cuda":
                torch.cuda.set_rng_state(training["cuda_rng"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RunError(f"{checkpoint} does not fit the settings of the run ({reason}): it is of another run or "
                           "version of thermopile; resume it with the version that started it") from error  # fmt: skip
        self.steps_done = info.step

    def _report(self, lines: list[dict[str, float]], seconds: float) -> StepReport:
        last = lines[-1]
        taus = [value for name, value in last.items() if name == "tau" or name.endswith("/tau_mean")]
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
