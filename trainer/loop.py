"""The training loop: epochs and steps, checkpoints and the log."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from ..pipeline.batch import Batch
from ..pipeline.loading.synthetic_loader import ADVICE as SYNTHETIC_ADVICE
from ..state_store.ranks import agreement
from ..streams import CudaDevice, Pace
from .build import create_order, device_named, objective_of, open_loader, windows_from
from .checkpointer import Checkpointer
from .config import TrainConfig
from .encoders import Encoders
from .encoders.averaging import AveragedEncoders
from .encoders.data_parallel import batch_norm_advice, encoders_of_a_step
from .encoders.initial_weights import load_initial_weights
from .encoders.locking import lock_advice
from .errors import NotFiniteError, RanksLostError, RunError, TrainingError
from .evaluation.online import OnlineEvaluation
from .failures import not_finite, ranks_lost, samples_after
from .metrics_log import MetricsLog, Scalar
from .objectives import FeaturesError, Outcome, Progress
from .opening import LOSS_SCALE, find_start, open_store, restore
from .optim import create_optimizer, learning_rate, momentum_at
from .precision import MixedPrecision, fast_kernels
from .run_directory import RunDirectory
from .step_clock import StepClock
from .step_report import StepReport, report_of
from .world import ALONE, World, refuse_separate_directories

MAX_SKIPPED = 10
"""Maximum number of consecutive skipped steps; corrupted weights never yield a finite step again."""

_log = logging.getLogger(__name__)


class Trainer:
    """One run, ready to step. Create it with `open`, which also resumes; `run` trains to the end.

    Everything that affects a result is a function of the settings and the step, so a resumed run neither repeats nor
    omits anything. With several ranks, each has a trainer, and all make the same calls.

    Steps are counted as steps done: `steps_done` is the number before a step while it is made. The step that makes it n
    is step n in metrics.jsonl, in the state and in the names of checkpoints.
    """

    def __init__(self, config: TrainConfig, run: RunDirectory, world: World, *, resume: bool) -> None:
        self.config, self.run_directory, self.world, self.mode = config, run, world, config.objective.mode
        self.dataset, start = find_start(config, run, world, resume=resume)
        self.device = device_named(config.device)
        torch.manual_seed(config.seed)
        self.objective = objective_of(config).to(self.device)
        self.encoders = Encoders.create(
            config.model, self.mode, config.data.image_size, self.dataset.index.tokenizer,
            pretrained=start is None, unit_norm=self.objective.unit_norm,
        ).to(self.device)  # fmt: skip
        self.order = create_order(config, self.dataset, self.objective, world)
        if config.data.local_views:
            self.encoders.image.backbone.check_side(config.data.local_size)
        self.total_steps = config.epochs * self.order.steps_per_epoch
        self._clock = StepClock(self.device)
        self._pace = Pace(CudaDevice(self.device)) if self.device.type == "cuda" else None
        self.objective.communicating = partial(self._clock.computing, "communication")
        self._encode = encoders_of_a_step(self.encoders, config, self.device, world, self._clock)
        self.optimizer = create_optimizer(config.optimizer, self.encoders, self.objective)
        self.precision = MixedPrecision(config.precision, self.device)
        self.steps_done = self._skipped_in_a_row = self._refused_rows = self._refused_before = 0
        with ExitStack() as opened:
            opened.enter_context(fast_kernels(config))
            self.loader = opened.enter_context(
                open_loader(config.data, self.dataset, self.order, self.mode, self.device, world)
            )
            with agreement(world.control, RunError):
                if start is None and config.init_from:
                    load_initial_weights(self.encoders, config.init_from, config.init_sides)
                # Only one rank evaluates; the others wait for it.
                self.evaluation = OnlineEvaluation.open(config, self.dataset, self.device) if world.is_first else None
                if not resume and world.is_first:
                    run.create(config)
            self.average = AveragedEncoders(self.encoders, config.model.ema) if config.model.ema else None
            if not resume:
                refuse_separate_directories(world, run.path)
            self.store, start = open_store(
                config, run, world, start, self.dataset, self.objective, self.order, self.device
            )
            opened.enter_context(self.store)
            if start is not None:
                self._refused_rows = self._refused_before = restore(start, self.store, self._parts())
                self.steps_done = start.info.step
            self.store.expect(windows_from(self.steps_done, self.order, config.epochs, world))
            self._prefetched = self.steps_done + 1  # the rows of that many steps need no prefetch
            with agreement(world.slow_group, RunError):  # reading a long log takes a while
                if world.is_first:
                    run.remove_leftovers()
                files = (run.metrics_file, run.tensorboard if config.tensorboard else None)
                # One rank writes the log: its metrics cover the whole batch.
                log = MetricsLog(*(files if world.is_first else (None, None)), keep_steps=self.steps_done)
                self.log = opened.enter_context(log)
            self.checkpointer = Checkpointer(config, run, self.store, self.log, world, self.dataset.index.fingerprint)
            opened.callback(self.checkpointer.close)
            self._resources = opened.pop_all()

    @classmethod
    def open(cls, config: TrainConfig, run: RunDirectory, *, resume: bool = False, world: World = ALONE) -> Self:
        """Start a run with resolved settings (`resolve`), or resume it from its latest checkpoint.

        Writes nothing until the ranks are known to agree and all parts have been built. Called by all ranks.
        Raises ConfigError, RunError, DatasetError, StateStoreError, OSError.
        """
        return cls(config, run, world, resume=resume)

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
        with self.world.naming_lost_ranks(lambda lost: ranks_lost(self.run_directory, lost, self.steps_done + 1)):
            self._run(on_report, should_stop, on_evaluation)

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
        for batch in self._batches():
            self.step(batch)
            # Once in a while: a report, an evaluation, a checkpoint.
            stop, checkpoint_is_due = self._agree(should_stop())
            is_last = stop or self.steps_done == self.total_steps
            evaluation_is_due = self.config.evaluation.is_due(self.steps_done) and not stop
            is_logged = self.steps_done % self.config.log_every == 0
            if is_last or checkpoint_is_due or evaluation_is_due or is_logged:
                lines, now = self._flushed_log(), time.monotonic()
                on_report(report_of(lines, self.total_steps, self.config.batch_size, now - reported_at))
                reported_at = now
            if evaluation_is_due:
                self._evaluate(should_stop, on_evaluation)
                is_last |= self._agree(should_stop())[0]
            if is_last or checkpoint_is_due:
                epoch = self.steps_done // self.order.steps_per_epoch
                self.checkpointer.save(self.steps_done, epoch, self.training_state, is_last=is_last)
            if is_last:
                return

    def _batches(self) -> Iterator[Batch]:
        """Yield the batches of all steps to come."""
        while self.steps_done < self.total_steps:
            batches = self.loader.epoch(*divmod(self.steps_done, self.order.steps_per_epoch))
            while True:
                with self._clock.waiting("data_wait"):
                    batch = next(batches, None)
                if batch is None:
                    break
                yield batch

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
            norm = self.precision.step(self.optimizer, self.config.optimizer.grad_clip_norm)
            # For the next step's keys. Not before them, so that on_nan = skip leaves this network unchanged as well.
            self.encoders.move_momentum(momentum_at(self.config.model.momentum, self.steps_done + 1, self.total_steps))
            if self.average is not None:
                self.average.follow(self.encoders, self.steps_done + 1)
        self._skipped_in_a_row = 0
        norms = {} if norm is None else {"gradient_norm": norm}
        scalars: dict[str, Scalar] = {"loss": outcome.loss, "learning_rate": rate, **norms, **outcome.metrics}
        self._end_step({"epoch": progress.epoch, **scalars})

    def _end_step(self, scalars: Mapping[str, Scalar]) -> None:
        self.steps_done += 1
        if self._pace is not None:
            self._pace.end_step()
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

    def _prefetch(self) -> None:
        """Let the store gather the rows of coming steps, each step's once."""
        end = min(self.steps_done + 1 + self.config.state.prefetch_steps, self.total_steps)
        for steps_done in range(self._prefetched, end):
            place = divmod(steps_done, self.order.steps_per_epoch)
            sample_ids = self.order.batch_ids(*place, self.world.rank, self.world.size)
            with self._clock.waiting("store_wait"):  # exclude the time to compute the order
                self.store.prefetch(sample_ids)
        self._prefetched = end

    def _outcome(self, batch: Batch, state: Mapping[str, Tensor], progress: Progress) -> Outcome | None:
        """Return the objective's outcome, or None if it is not finite and such steps are skipped."""
        skips = self.config.on_nan == "skip"
        # The norms of a bad batch would remain in their running means.
        buffers = [buffer.clone() for buffer in self.encoders.buffers()] if skips else []
        with self.precision.autocast():
            features = self._encode(batch.to(self.device))
        if not (skips and self.world.any_rank(not _all_finite(*features.tensors()))):
            try:
                outcome: Outcome = self.objective(
                    features.first, features.second, state, progress, features.keys, features.local
                )
            except FeaturesError as error:
                self._flushed_log()  # the loss of an earlier step may be the cause
                raise self._not_finite(self.steps_done, f"step {self.steps_done + 1:,}: {error}") from error
            if not (skips and not _all_finite(outcome.loss)):
                return outcome
        for buffer, before in zip(self.encoders.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return None

    def _skip(self, progress: Progress) -> None:
        """Leave weights and state unchanged; too many skipped steps in a row end the run."""
        self._skipped_in_a_row += 1
        step = self.steps_done + 1
        if self._skipped_in_a_row > MAX_SKIPPED:
            self._flushed_log()
            why = f"steps {step - MAX_SKIPPED:,} to {step:,} gave values that are not finite"
            raise self._not_finite(self.steps_done, why)
        if self.world.is_first:
            samples = samples_after(self.steps_done, self.order)
            _log.warning("step %d gave values that are not finite and was skipped. %s", step, samples)
        self._end_step({"epoch": progress.epoch, "loss": None, "skipped": True})

    def _flushed_log(self) -> list[dict[str, Any]]:
        try:
            return self.log.flush()
        except NotFiniteError as error:
            raise self._not_finite(error.step - 1, str(error)) from error

    def _not_finite(self, steps_done: int, why: str) -> TrainingError:
        """steps_done: number before the bad step."""
        self.checkpointer.wait()  # on this rank only: the others may not know yet
        return not_finite(self.run_directory, self.order, steps_done, why)

    def _evaluate(self, should_stop: Callable[[], bool], on_evaluation: Callable[[dict[str, Any]], None]) -> None:
        """Score the encoders after this step, once its line is written, on rank 0; the others wait."""
        evaluation, scores = self.evaluation, None
        if evaluation is not None:
            scores = evaluation.scores(self.average or self.encoders, self.steps_done, should_stop)
        if scores is not None:
            on_evaluation(self.log.add_evaluation(self.steps_done, scores, averaged=self.average is not None))
        self.world.slow_group.broadcast(None)

    def _lacks_evaluation(self) -> bool:
        """Return whether the run resumes at a step whose evaluation is due but missing."""
        is_due = self.steps_done > 0 and self.config.evaluation.is_due(self.steps_done)
        return is_due and not self.log.has_evaluation

    def _agree(self, stop: bool) -> tuple[bool, bool]:
        """Agree at the end of a step whether any rank is to stop, and whether a checkpoint is due."""
        own = [stop, self.store.refused_rows, self.checkpointer.is_due(self.steps_done), self.checkpointer.write_state]
        stops, refused, dues, write_states = map(list, zip(*self.world.all_gather(own), strict=True))
        self._refused_rows = self._refused_before + sum(refused)
        self.checkpointer.settle(write_states)
        return any(stops), bool(dues[0])

    def advice(self) -> list[str]:
        """Return warnings to show before the run begins; empty if there are none."""
        of_norms = batch_norm_advice(self.encoders, self.device, self.world)
        of_evaluation = self.evaluation.notes if self.evaluation else []
        of_data = [SYNTHETIC_ADVICE] if self.config.data.loader == "synthetic" else []
        of_objective = self.objective.advice(self.config.batch_size, keys=self.config.model.momentum > 0)
        return of_objective + lock_advice(self.config) + of_norms + of_data + of_evaluation

    def _parts(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the samples' state, by name; each has state_dict, load_state_dict."""
        scaler = self.precision.scaler
        parts = {"encoders": self.encoders, "objective": self.objective, "optimizer": self.optimizer}
        averaged = {} if self.average is None else {"averaged": self.average}
        return parts | averaged | {LOSS_SCALE: scaler}

    def training_state(self) -> dict[str, Any]:
        """Return the model's part of a checkpoint: tensors on the device, not copied."""
        states = {name: part.state_dict() for name, part in self._parts().items()}
        return states | {"refused_rows": self._refused_rows}

    def close(self) -> None:
        """End the threads and release the run. Steps after the last checkpoint are lost."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # If ranks are gone, threads may wait for them for an hour.
        if kind is None or not issubclass(kind, RanksLostError):
            self.close()


def _all_finite(*tensors: Tensor) -> bool:
    """Return whether all values are finite; synchronises with the device."""
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)
