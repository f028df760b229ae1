"""The training loop: epochs and steps, checkpoints and the log."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from ..pipeline.batch import Batch
from ..pipeline.loading.synthetic_loader import ADVICE as SYNTHETIC_ADVICE
from ..state_store.ranks import agreement
from .encoders import Features
from .encoders.averaging import AveragedEncoders
from .encoders.data_parallel import batch_norm_advice, encoders_of_a_step
from .encoders.locking import lock_advice
from .encoders.micro_batches import MicroBatches, OnePiece, StepEncoder
from .errors import RunError
from .evaluation.online import OnlineEvaluation
from .metrics.metrics_log import Scalar
from .metrics.step_report import RECENT_STEPS, StepReport, report_of
from .objectives import FeaturesError, Outcome, Progress
from .objectives.isogclr import IndividualTemperature
from .optim import create_optimizer, learning_rate, momentum_at, warmup_steps
from .precision import MixedPrecision
from .run.failures import ranks_lost, samples_after
from .run.restoring import LOSS_SCALE
from .run.run import Run

MAX_SKIPPED = 10
"""Maximum number of consecutive skipped steps; corrupted weights never yield a finite step again."""
_log = logging.getLogger(__name__)


class Trainer(Run):
    """A run with thermopile's own training loop. `run` trains to the end."""

    def _prepare(self) -> None:
        config = self.config
        encode = encoders_of_a_step(self.encoders, config, self.device, self.world, self._clock)
        factors = self.encoders.learning_rate_factors(config.optimizer.layer_decay)
        self.optimizer = create_optimizer(config.optimizer, self.encoders, self.objective, factors)
        self.precision = MixedPrecision(config.precision, self.device)
        shared = encode, self.precision, self.device, self._clock
        self._encoder: StepEncoder = OnePiece(*shared)
        if self._pieces > 1:
            self._encoder = MicroBatches(self.encoders, *shared, self._seed_random_numbers)
        self.average = AveragedEncoders(self.encoders, config.model.ema) if config.model.ema else None
        averaged = {} if self.average is None else {"averaged": self.average}
        self.attach(optimizer=self.optimizer, **averaged, **{LOSS_SCALE: self.precision.scaler})
        self._skipped_in_a_row = 0
        with agreement(self.world.control, RunError):
            self.evaluation = OnlineEvaluation.open(config, self.dataset, self.device, self.world, self.selection)

    def run(
        self,
        on_report: Callable[[StepReport], None] = lambda report: None,
        should_stop: Callable[[], bool] = lambda: False,
        on_evaluation: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> None:
        """Train to the last step, or until should_stop, polled after every step, returns True.

        If any rank is to stop, all do. A checkpoint that cannot be written, for example on a full disk, is logged as a
        warning and retried; only the last one must succeed. on_evaluation: called on rank 0 with each evaluation's line
        of metrics.jsonl.
        Raises TrainingError if the loss is not finite or a rank is lost, and SnapshotError or OSError at the end.
        """
        with self.world.naming_lost_ranks(lambda lost: ranks_lost(self.run_directory, lost, self.steps_done + 1)):
            self._run(on_report, should_stop, on_evaluation)

    def _run(
        self,
        on_report: Callable[[StepReport], None],
        should_stop: Callable[[], bool],
        on_evaluation: Callable[[dict[str, Any]], None],
    ) -> None:
        reported_at, recent = time.monotonic(), deque[dict[str, Any]](maxlen=RECENT_STEPS)
        if self.world.control.broadcast(self._lacks_evaluation()):
            self._evaluate(should_stop, on_evaluation)  # an evaluation that a stop prevented
            if self._agree(should_stop())[0]:
                return
        self._clock.end_step()  # earlier time belongs to no step
        for pieces in self._steps():
            self.step(pieces)
            # Once in a while: a report, an evaluation, a checkpoint.
            stop, checkpoint_is_due = self._agree(should_stop())
            is_last = stop or self.steps_done == self.total_steps
            evaluation_is_due = self.config.evaluation.is_due(self.steps_done) and not stop
            is_logged = self.steps_done % self.config.log_every == 0
            if is_last or checkpoint_is_due or evaluation_is_due or is_logged:
                lines, now = self._flushed_log(), time.monotonic()
                recent += lines
                on_report(report_of(lines, recent, self.total_steps, self.config, now - reported_at))
                reported_at = now
            if evaluation_is_due:
                self._evaluate(should_stop, on_evaluation)
                is_last |= self._agree(should_stop())[0]
            if is_last or checkpoint_is_due:
                self._save(is_last=is_last)
            if is_last:
                return

    def step(self, pieces: Iterable[Batch]) -> None:
        """Make one step: features, state in, loss, state out, gradients, weights.

        pieces: the batch; with `micro_batch` set, its pieces in order. Nothing here reads from the device, except
        fp16's overflow check and, with on_nan = skip, the check for bad values.
        """
        progress = self.progress
        self._begin_step()
        # Otherwise a bad batch's norms would remain in the running means.
        buffers = [buffer.clone() for buffer in self.encoders.buffers()] if self.config.on_nan == "skip" else []
        self._seed_random_numbers()
        sample_ids, features = self._encoder.encode(pieces)
        state = self._take(sample_ids)

        with self._clock.computing("forward_backward"):
            outcome = self._outcome(features, state, progress)
        if outcome is None:
            for buffer, before in zip(self.encoders.buffers(), buffers, strict=True):
                buffer.copy_(before)
            self._skip(progress)
            return

        self._put(sample_ids, outcome.state)

        rate = learning_rate(self.config.optimizer, self.steps_done, self.order.steps_per_epoch, self.total_steps)
        self.optimizer.set_learning_rate(rate)
        self.optimizer.zero_grad()
        with self._clock.computing("forward_backward"):
            self.precision.backward(outcome.loss)
            self._encoder.finish_backward()
            self._clock.end_of_backward()
        with self._clock.computing("optimizer"):
            norm = self.precision.step(self.optimizer, self.config.optimizer.grad_clip_norm)
            # For the next step's keys. Only here, so that on_nan = skip leaves the momentum network unchanged as well.
            self.encoders.move_momentum(momentum_at(self.config.model.momentum, self.steps_done + 1, self.total_steps))
            if self.average is not None:
                self.average.follow(self.steps_done + 1)
        self._skipped_in_a_row = 0
        norms = {} if norm is None else {"gradient_norm": norm}
        scalars: dict[str, Scalar] = {"loss": outcome.loss, "learning_rate": rate, **norms, **outcome.metrics}
        self._count_step({"epoch": progress.epoch, **scalars})

    def _outcome(self, features: Features, state: Mapping[str, Tensor], progress: Progress) -> Outcome | None:
        """Return the objective's outcome, or None if it is not finite and such steps are skipped."""
        skips = self.config.on_nan == "skip"
        if not (skips and self.world.any_rank(not _all_finite(*features.tensors()))):
            try:
                outcome: Outcome = self.objective(
                    features.first, features.second, state, progress, features.keys, features.local
                )
            except FeaturesError as error:
                self._flushed_log()  # an earlier step's loss may be the cause
                raise self._not_finite(self.steps_done, f"step {self.steps_done + 1:,}: {error}") from error
            if not (skips and not _all_finite(outcome.loss)):
                return outcome
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
            samples = samples_after(self.steps_done, self.served)
            _log.warning("step %d gave values that are not finite and was skipped. %s", step, samples)
        self._count_step({"epoch": progress.epoch, "loss": None, "skipped": True})

    def _evaluate(self, should_stop: Callable[[], bool], on_evaluation: Callable[[dict[str, Any]], None]) -> None:
        """Score the encoders after this step, once its line is written; the others wait for rank 0's scores."""
        evaluation, scores = self.evaluation, None
        if evaluation is not None:
            scores = evaluation.scores(self.average or self.encoders, self.steps_done, should_stop)
        if scores is not None and self.world.is_first:
            on_evaluation(self.log.add_evaluation(self.steps_done, scores, averaged=self.average is not None))
        self.world.slow_group.broadcast(None)

    def _lacks_evaluation(self) -> bool:
        """Return whether the run resumes at a step whose evaluation is due but missing."""
        is_due = self.steps_done > 0 and self.config.evaluation.is_due(self.steps_done)
        return is_due and not self.log.has_evaluation

    def advice(self) -> list[str]:
        """Return warnings to show before the run begins; empty if there are none."""
        of_norms = batch_norm_advice(self.encoders, self.device, self.world, self._pieces)
        of_evaluation = self.evaluation.notes if self.evaluation else []
        warmup = warmup_steps(self.config.optimizer, self.order.steps_per_epoch)
        of_rate = [
            f"the run ends after {self.total_steps:,} steps, within its warm-up of {warmup:,}, and optimizer.lr is not "
            "reached: train longer, or set optimizer.warmup_steps to a tenth of the steps"
        ] * (warmup >= self.total_steps)
        of_data = [SYNTHETIC_ADVICE] if self.config.data.loader == "synthetic" else []
        of_objective = self.objective.advice(self.config.batch_size, keys=self.config.model.momentum > 0)
        content = None if self.config.data.select or self.config.data.without else self.dataset.index.content  # of all
        if content and isinstance(self.objective, IndividualTemperature):
            of_objective += self.objective.advice_on_repeats(content)
        return of_rate + of_objective + lock_advice(self.config) + of_norms + of_data + of_evaluation


def _all_finite(*tensors: Tensor) -> bool:
    """Return whether all values are finite; synchronises with the device."""
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)
