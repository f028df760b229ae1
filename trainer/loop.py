"""The training loop: epochs and steps, checkpoints and the log."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..pipeline.batch import Batch
from ..pipeline.dataset import Dataset
from ..pipeline.order import ORDER_VERSION
from ..state_store import DamagedChunkError, SnapshotNotFoundError, StateStore
from ..state_store.ranks import agreement
from .build import create_order, device_named, objective_of, open_loader, windows_from
from .checkpoint import (
    CheckpointInfo,
    Loaded,
    checkpoints_in,
    latest_checkpoint,
    load_latest,
    remove_checkpoints,
)
from .checkpointer import Checkpointer, CopyOnHost, warn_of_failure
from .config import TrainConfig, to_toml
from .encoders import Encoders
from .encoders.data_parallel import batch_norm_advice, encoders_of_a_step
from .encoders.initial_weights import load_initial_weights
from .encoders.mixed_precision import MixedPrecision
from .errors import NotFiniteError, RanksLostError, RunError, TrainingError
from .evaluation.online import OnlineEvaluation
from .failures import not_finite, ranks_lost, samples_of
from .metrics_log import MetricsLog, Scalar
from .objectives import FeaturesError, Outcome, Progress
from .optim import create_optimizer, learning_rate
from .rank_differences import refuse_differences, refuse_separate_directories
from .resume_settings import changes_since
from .run_directory import RunDirectory
from .step_clock import StepClock
from .step_report import StepReport, report_of
from .tensorboard_log import TensorBoardLog
from .world import ALONE, World

MAX_SKIPPED = 10
"""Maximum number of consecutive skipped steps; corrupted weights never yield a finite step again."""

_log = logging.getLogger(__name__)


class Trainer:
    """One run, ready to step. Create it with `open`, which also resumes; `run` trains to the end.

    Everything that affects a result is a function of the settings and the step, so a resumed run neither repeats nor
    omits anything. With several ranks, each has a trainer, and all make the same calls.
    """

    def __init__(
        self, config: TrainConfig, run: RunDirectory, dataset: Dataset, world: World = ALONE, *, pretrained: bool = True
    ) -> None:
        """pretrained: load the weights of local directories into the encoders."""
        torch.manual_seed(config.seed)
        self.config, self.run_directory, self.dataset, self.world = config, run, dataset, world
        self.device = device_named(config.device)
        self.mode = config.objective.mode
        tokenizer = dataset.index.tokenizer
        self.encoders = Encoders.create(
            config.model, self.mode, config.data.image_size, tokenizer, pretrained=pretrained
        ).to(self.device)
        self.objective = objective_of(config).to(self.device)
        self.order = create_order(config, dataset, self.objective, world)
        self.total_steps = config.epochs * self.order.steps_per_epoch
        self.steps_done = 0
        self._clock = StepClock(self.device)
        self.objective.communicating = partial(self._clock.computing, "communication")
        self._encode = encoders_of_a_step(self.encoders, config, self.device, world, self._clock)
        self.optimizer = create_optimizer(config.optimizer, self.encoders, self.objective)
        self.precision = MixedPrecision(config.precision, self.device)
        self._skipped_in_a_row = self._refused_rows = self._refused_before = 0
        self.evaluation: OnlineEvaluation | None = None
        self._resources = ExitStack()
        self.loader = open_loader(config.data, dataset, self.order, self.mode, self.device, world)
        self._resources.enter_context(self.loader)

    @classmethod
    def open(cls, config: TrainConfig, run: RunDirectory, *, resume: bool = False, world: World = ALONE) -> Trainer:
        """Start a run with resolved settings (`resolve`), or resume it from its latest checkpoint.

        Writes nothing until the ranks are known to agree and all parts have been built. Called by all ranks.
        Raises ConfigError, RunError, DatasetError, StateStoreError, OSError.
        """
        with agreement(world.control, RunError):
            run.refuse_links()
            dataset, latest = Dataset(Path(config.data.path)), latest_checkpoint(run.checkpoints) if resume else None
            loaded = load_latest(run.checkpoints) if resume else None
            if loaded is not None:
                _compare_settings(config, loaded, world)
        refuse_differences(world, config, dataset, loaded[1] if loaded else None)
        trainer = cls(config, run, dataset, world, pretrained=loaded is None)
        try:
            with agreement(world.control, RunError):
                if loaded is None and config.init_from:
                    load_initial_weights(trainer.encoders, config.init_from)
                # Only one rank evaluates; the others wait for it.
                trainer.evaluation = OnlineEvaluation.open(config, dataset, trainer.device) if world.is_first else None
                if not resume and world.is_first:
                    run.create(config)
            if not resume:
                refuse_separate_directories(world, run.path)
            if resume and loaded is None and world.is_first:
                _log.warning("%s has no checkpoint: the run starts over at step 0", run.path)
            trainer._open_state(loaded, latest)
        except BaseException:
            trainer.close()
            raise
        return trainer

    def _open_state(self, loaded: Loaded | None, latest: Path | None) -> None:
        """latest: the checkpoint that was the newest when `loaded` was read."""
        if loaded is None:
            self.store = self._resources.enter_context(self._new_store())
        else:
            checkpoint, info, training = loaded = self._open_store(loaded, latest)
            if info.order_version != ORDER_VERSION:
                raise RunError(f"{checkpoint} was made with sample order {info.order_version}, but this version uses "
                               f"order {ORDER_VERSION}; resume it with the version that started it")  # fmt: skip
            if info.step != (taken_at := self.store.last_snapshot.step):
                raise RunError(
                    f"{checkpoint} is damaged: it is of step {info.step}, its state snapshot of step {taken_at}"
                )
            self._restore(checkpoint, info, training)
        self.store.expect(windows_from(self.steps_done, self.order, self.config.epochs, self.world))
        self._prefetched = self.steps_done + 1  # earlier steps need no prefetch
        with agreement(self.world.slow_group, RunError):  # reading a long log takes a while
            # One rank writes the log: its metrics cover the whole batch.
            metrics = self.run_directory.metrics_file if self.world.is_first else None
            self.log = self._resources.enter_context(MetricsLog(metrics, keep_steps=self.steps_done))
            self._tensorboard = None
            if self.world.is_first:
                self.run_directory.remove_leftovers()
            if self.config.tensorboard and self.world.is_first:
                board = TensorBoardLog(self.run_directory.tensorboard, keep_steps=self.steps_done)
                self._tensorboard = self._resources.enter_context(board)
        self._checkpointer = Checkpointer(self.config, self.run_directory, self.log, self.world)
        self._resources.callback(self._checkpointer.close)

    def _open_store(self, loaded: Loaded, latest: Path | None) -> Loaded:
        """Open the state at a checkpoint's snapshot; if damaged, at an earlier checkpoint's. Return the one used."""
        folder = self.run_directory.checkpoints

        def confirm() -> None:
            if latest_checkpoint(folder) != latest:
                raise RunError(f"another process has just written a checkpoint in {folder}; resume again")

        while True:
            checkpoint, info, _ = loaded
            try:
                store = StateStore.open(
                    self.run_directory.state, at=info.snapshot, confirm=confirm, **self._store_settings()
                )
            except Exception as error:  # whatever fails on one rank, fails on all
                is_damaged = isinstance(error, DamagedChunkError | SnapshotNotFoundError)
                if not self._any_rank(is_damaged) or (earlier := self._earlier(checkpoint)) is None:
                    raise
                if self.world.is_first:
                    _log.warning(
                        "the state of %s is damaged (%s). Resuming from %s", checkpoint, error, earlier[0].name
                    )
                loaded = earlier
            else:
                self.store = self._resources.enter_context(store)
                if self.world.is_first:  # later checkpoints have lost their state
                    steps = checkpoints_in(folder)
                    remove_checkpoints(folder, keep={step for step in steps if step <= info.step})
                return loaded

    def _earlier(self, checkpoint: Path) -> Loaded | None:
        """Return the newest intact checkpoint before another; the same on all ranks, or an error on all."""
        with agreement(self.world.control, RunError):
            earlier = load_latest(self.run_directory.checkpoints, before=checkpoint)
        name = earlier and earlier[0].name
        of_first = self.world.control.broadcast(name)
        with agreement(self.world.control, RunError):
            if name != of_first:
                raise RunError(f"the ranks differ: rank {self.world.rank} resumes from {name}, rank 0 from {of_first}")
            if earlier is not None:
                _compare_settings(self.config, earlier, self.world)
        return earlier

    def _store_settings(self) -> dict[str, Any]:
        return {
            "samples": self.dataset.n,
            "fields": self.objective.fields,
            "dataset_fingerprint": self.dataset.index.fingerprint,
            "device": self.device,
            "memory_budget": self.config.state.memory_budget,
            "ranks": self.world.snapshots,
            "owned": self.order.rank_ids(self.world.rank, self.world.size),
        }

    def _new_store(self) -> StateStore:
        """Create a store, or return one left by a run killed before its first checkpoint to its initial values."""
        exists = self.world.control.broadcast(self.run_directory.state.exists())
        if exists:
            return StateStore.open(self.run_directory.state, at="step-0", **self._store_settings())
        return StateStore.create(self.run_directory.state, block_rows=self.order.block_rows, **self._store_settings())

    def run(
        self,
        on_report: Callable[[StepReport], None] = lambda report: None,
        should_stop: Callable[[], bool] = lambda: False,
        on_evaluation: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> None:
        """Train to the last step, or until should_stop, polled after every step, returns True.

        If one rank is to stop, all do. A checkpoint that cannot be written, for example on a full disk, is logged as a
        warning and retried; only the last one must succeed. on_evaluation: called on rank 0 with each evaluation's line
        of metrics.jsonl.
        Raises TrainingError if the loss is not finite or a rank is lost, and SnapshotError or OSError at the end.
        """
        try:
            self._run(on_report, should_stop, on_evaluation)
        except RuntimeError as error:
            if lost := self.world.lost_ranks():
                raise ranks_lost(self.run_directory, self.world, lost, self.steps_done + 1) from error
            raise

    def _run(
        self, on_report: Callable[[StepReport], None], should_stop: Callable[[], bool],
        on_evaluation: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        reported_at = time.monotonic()
        if self.world.control.broadcast(self._lacks_evaluation()):
            self._evaluate(should_stop, on_evaluation)  # an evaluation that a stop had prevented
            if self._agree(should_stop())[0]:
                return
        self._clock.end_step()  # what came before belongs to no step
        while self.steps_done < self.total_steps:
            epoch, first_step = divmod(self.steps_done, self.order.steps_per_epoch)
            batches = self.loader.epoch(epoch, first_step)
            while (batch := self._next(batches)) is not None:
                self.step(batch)
                stop, checkpoint_is_due = self._agree(should_stop())
                is_last = stop or self.steps_done == self.total_steps
                evaluation_is_due = self.config.evaluation.is_due(self.steps_done) and not stop
                is_logged = self.steps_done % self.config.log_every == 0
                # Not in every step.
                if is_last or checkpoint_is_due or evaluation_is_due or is_logged:
                    lines, now = self._flushed_log(), time.monotonic()
                    on_report(report_of(lines, self.total_steps, self.config.batch_size, now - reported_at))
                    reported_at = now
                if evaluation_is_due:
                    self._evaluate(should_stop, on_evaluation)
                    is_last |= self._agree(should_stop())[0]
                if is_last or checkpoint_is_due:
                    self._begin_checkpoint()
                if is_last:
                    self._end_checkpoint(must_succeed=True)
                    return

    def step(self, batch: Batch) -> None:
        """Make one step: state in, loss, state out, gradients, weights.

        Nothing here reads from the device, except fp16's overflow check and, with on_nan = skip, the check for bad
        values.
        """
        sample_ids, progress = batch.sample_ids, Progress(self.steps_done, self.order.steps_per_epoch)
        self._seed_random_numbers()
        with self._clock.waiting("store_wait"):
            state = self.store.take(sample_ids)
        self._prefetch()

        with self._clock.computing("forward_backward"):
            outcome = self._outcome(batch, state, progress)
        if outcome is None:
            self._skip(progress)
            return

        with self._clock.waiting("store_wait"):
            # Asynchronous: written during backprop.
            self.store.put(sample_ids, outcome.state, step=self.steps_done + 1)

        rate = learning_rate(self.config.optimizer, self.steps_done, self.order.steps_per_epoch, self.total_steps)
        self.optimizer.set_learning_rate(rate)
        self.optimizer.zero_grad()
        with self._clock.computing("forward_backward"):
            self.precision.backward(outcome.loss)
            self._clock.end_of_backward()
        with self._clock.computing("optimizer"):
            self.precision.step(self.optimizer)
        self._skipped_in_a_row = 0
        self._end_step({"epoch": progress.epoch, "loss": outcome.loss, "learning_rate": rate, **outcome.metrics})

    def _end_step(self, scalars: Mapping[str, Scalar]) -> None:
        self.steps_done += 1
        backlog = {"write_backlog_seconds": self.store.write_backlog}
        times = self._clock.end_step()
        self.log.add({"step": self.steps_done, **scalars, "refused_rows": self._refused_rows} | times | backlog)

    def _seed_random_numbers(self) -> None:
        """Derive random numbers, e.g. for dropout, from the step, so that nothing needs saving; ranks differ."""
        key = f"{self.config.seed}/{self.steps_done}/{self.world.rank}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)

    def _outcome(self, batch: Batch, state: Mapping[str, Tensor], progress: Progress) -> Outcome | None:
        """Return the objective's outcome, or None if it is not finite and such steps are skipped."""
        skips = self.config.on_nan == "skip"
        # The norms of a bad batch would remain in their running means.
        buffers = [buffer.clone() for buffer in self.encoders.buffers()] if skips else []
        with self.precision.autocast():
            first, second = self._encode(batch.to(self.device))
        if not (skips and self._any_rank(not _all_finite(first, second))):
            outcome = self._checked_outcome(first, second, state, progress)
            if not (skips and not _all_finite(outcome.loss)):
                return outcome
        for buffer, before in zip(self.encoders.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return None

    def _checked_outcome(
        self, first: Tensor, second: Tensor, state: Mapping[str, Tensor], progress: Progress
    ) -> Outcome:
        try:
            outcome: Outcome = self.objective(first, second, state, progress)
        except FeaturesError as error:
            self._flushed_log()  # the loss of an earlier step may be the cause
            raise self._not_finite(self.steps_done + 1, f"step {self.steps_done + 1:,}: {error}") from error
        return outcome

    def _skip(self, progress: Progress) -> None:
        """Leave weights and state unchanged; too many skipped steps in a row end the run."""
        self._skipped_in_a_row += 1
        step = self.steps_done + 1
        if self._skipped_in_a_row > MAX_SKIPPED:
            self._flushed_log()
            raise self._not_finite(step, f"steps {step - MAX_SKIPPED:,} to {step:,} gave values that are not finite")
        if self.world.is_first:
            samples = samples_of(self.order, step)
            _log.warning("step %d gave values that are not finite and was skipped. %s", step, samples)
        self._end_step({"epoch": progress.epoch, "loss": None, "skipped": True})

    def _any_rank(self, flag: bool) -> bool:
        return any(of_rank[0] for of_rank in self.world.all_gather([flag]))

    def _flushed_log(self) -> list[dict[str, Any]]:
        try:
            lines = self.log.flush()
        except NotFiniteError as error:
            raise self._not_finite(error.step, str(error)) from error
        if self._tensorboard is not None:
            self._tensorboard.add(lines)
        return lines

    def _evaluate(self, should_stop: Callable[[], bool], on_evaluation: Callable[[dict[str, Any]], None]) -> None:
        """Score the encoders after this step, once its line is written, on rank 0; the others wait."""
        step, evaluation = self.steps_done, self.evaluation
        scores = None if evaluation is None else evaluation.scores(self.encoders, step, should_stop)
        if scores is not None:
            line = self.log.add_evaluation(step, scores)
            if self._tensorboard is not None:
                self._tensorboard.add([line])
            on_evaluation(line)
        self.world.slow_group.broadcast(None)

    def _lacks_evaluation(self) -> bool:
        """Return whether the run resumes at a step whose evaluation is due but missing."""
        is_due = self.steps_done > 0 and self.config.evaluation.is_due(self.steps_done)
        return is_due and not self.log.has_evaluation

    def _not_finite(self, step: int, why: str) -> TrainingError:
        self._checkpointer.wait()  # on this rank only: the others may not know yet
        return not_finite(self.run_directory, self.order, step, why)

    def _agree(self, stop: bool) -> tuple[bool, bool]:
        """Agree at the end of a step whether any rank is to stop, and whether a checkpoint is due."""
        due, write_state = self._checkpointer.is_due(self.steps_done), self._checkpointer.write_state
        of_ranks = self.world.all_gather([stop, due, write_state, self.store.refused_rows])
        stops, dues, write_states, refused = map(list, zip(*of_ranks, strict=True))
        self._refused_rows = self._refused_before + sum(refused)
        self._settle(write_states)
        return any(stops), bool(dues[0])

    def _begin_checkpoint(self) -> None:
        """Cut the state and clone the weights; both are written while training continues."""
        self._end_checkpoint()
        self._flushed_log()
        config_hash = hashlib.sha256(to_toml(self.config).encode()).hexdigest()
        epoch = self.steps_done // self.order.steps_per_epoch
        snapshot = self.store.snapshot(self.steps_done, epoch=epoch, config_hash=config_hash)
        training = CopyOnHost(self._training_state()) if self.world.is_first else None
        self._checkpointer.begin(self.steps_done, snapshot, training, self.dataset.index.fingerprint)

    def _end_checkpoint(self, *, must_succeed: bool = False) -> None:
        """Wait for the pending checkpoint, if any."""
        if self._checkpointer.wait():
            of_ranks = self.world.all_gather([self._checkpointer.write_state])
            self._settle([write_state for (write_state,) in of_ranks], must_succeed=must_succeed)

    def _settle(self, write_states: list[int], *, must_succeed: bool = False) -> None:
        if self._checkpointer.settle(write_states, must_succeed=must_succeed):
            keep = self.config.checkpoint
            self.store.retain(keep.keep_last, keep.keep_every).add_done_callback(warn_of_failure)

    def advice(self) -> list[str]:
        """Return warnings to show before the run begins; empty if there are none."""
        of_norms = batch_norm_advice(self.encoders, self.device, self.world)
        of_evaluation = self.evaluation.notes if self.evaluation else []
        return self.objective.advice(self.config.batch_size) + of_norms + of_evaluation

    def close(self) -> None:
        """End the threads and release the run. Steps after the last checkpoint are lost."""
        self._resources.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # If ranks are gone, threads may wait for them for an hour.
        if kind is None or not issubclass(kind, RanksLostError):
            self.close()

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        with self._clock.waiting("data_wait"):
            return next(batches, None)

    def _prefetch(self) -> None:
        """Let the store gather the rows of coming steps, each step's once."""
        end = min(self.steps_done + 1 + self.config.state.prefetch_steps, self.total_steps)
        for step in range(self._prefetched, end):
            place = divmod(step, self.order.steps_per_epoch)
            sample_ids = self.order.batch_ids(*place, self.world.rank, self.world.size)
            with self._clock.waiting("store_wait"):  # exclude the time to compute the order
                self.store.prefetch(sample_ids)
        self._prefetched = end

    def _training_state(self) -> dict[str, Any]:
        return {
            "encoders": self.encoders.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loss_scale": self.precision.scaler.state_dict(),
            "refused_rows": self._refused_rows,
        }

    def _restore(self, checkpoint: Path, info: CheckpointInfo, training: dict[str, Any]) -> None:
        try:
            self.encoders.load_state_dict(training["encoders"])
            self.objective.load_state_dict(training["objective"])
            self.optimizer.load_state_dict(training["optimizer"])
            self._refused_rows = self._refused_before = int(training.get("refused_rows", 0))
            if scale := training.get("loss_scale"):
                self.precision.scaler.load_state_dict(scale)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RunError(f"{checkpoint} does not match the run's settings ({reason}): it is from another run or "
                           "version of thermopile; resume it with the version that started it") from error  # fmt: skip
        self.steps_done = info.step


def _compare_settings(config: TrainConfig, loaded: Loaded, world: World) -> None:
    """Warn of settings changed since a checkpoint was made. Raises ConfigError, RunError as changes_since."""
    path, info, _ = loaded
    if (changes := changes_since(path, info.settings, config)) and world.is_first:
        _log.warning("the settings have changed since %s: %s", path, "; ".join(change.arrow for change in changes))


def _all_finite(*tensors: Tensor) -> bool:
    """Return whether all values are finite; synchronises with the device."""
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)
