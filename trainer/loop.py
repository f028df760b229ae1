"""The training loop: epochs and steps, checkpoints and the log."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from ..pipeline.batch import Batch
from ..pipeline.loading.synthetic_loader import ADVICE as SYNTHETIC_ADVICE
from ..state_store.ranks import agreement
from ..storage.place import AnyPlace, Places
from .config import TrainConfig
from .encoders import AveragedEncoders, Features
from .encoders.data_parallel import batch_norm_advice, encoders_of_a_step
from .encoders.locking import lock_advice, starts_trained
from .encoders.micro_batches import MicroBatches, OnePiece, joined_features
from .errors import ConfigError, RunError
from .evaluation.online import OnlineEvaluation
from .metrics.metrics_log import Scalar
from .metrics.step_report import RECENT_STEPS, StepReport, report_of
from .objectives import FeaturesError, Outcome, Progress
from .objectives.isogclr import IndividualTemperature
from .optim import create_optimizer, learning_rate, momentum_at, warmup_steps
from .precision import MixedPrecision
from .run.chosen_settings import has_own_heads
from .run.restoring import LOSS_SCALE
from .run.run import Run
from .run_directory import RunDirectory

MAX_SKIPPED = 10
"""Maximum number of consecutive skipped steps; corrupted weights never yield a finite step again."""
_log = logging.getLogger(__name__)


class Trainer(AbstractContextManager["Trainer"]):
    """Thermopile's own training loop over a run, which it holds as `run`. `train` trains to the end."""

    def __init__(self, run: Run) -> None:
        """Make the loop's own parts for a run that has not begun, and attach them. Called by all ranks.

        Raises ConfigError, RunError.
        """
        config, world, self.run = run.config, run.world, run
        encode = encoders_of_a_step(run.encoders, config, run.device, world, run.clock)
        factors = run.encoders.learning_rate_factors(config.optimizer.layer_decay)
        self.optimizer = create_optimizer(config.optimizer, run.encoders, run.objective, factors)
        self.precision = MixedPrecision(config.precision, run.device)
        shared = encode, self.precision, run.device, run.clock
        self._encoder = OnePiece(*shared)
        if run.pieces > 1:
            self._encoder = MicroBatches(run.encoders, *shared, run.seed_random_numbers)
        self.average = AveragedEncoders(run.encoders, config.model.ema) if config.model.ema else None
        averaged = {} if self.average is None else {"averaged": self.average}
        run.attach(optimizer=self.optimizer, **averaged, **{LOSS_SCALE: self.precision.scaler})
        self._skipped_in_a_row = 0
        with agreement(world.control, RunError):
            self.evaluation = OnlineEvaluation(run) if config.evaluation.every_steps else None

    @classmethod
    def open(cls, config: TrainConfig, directory: RunDirectory, **options: Any) -> Self:
        """Start a run with complete settings, or resume it, as `Run` does, whose options it has."""
        return cls._begun(Run(config, directory, **options))

    @classmethod
    def from_settings(
        cls, path: AnyPlace, data: Places, settings: Mapping[str, Any] | None = None, **options: Any
    ) -> Self:
        """Start the run at `path`, or resume it there, as `Run.from_settings` does, whose options it has."""
        return cls._begun(Run.from_settings(path, data, settings, **options, begin=False), record=True)

    @classmethod
    def _begun(cls, run: Run, *, record: bool = False) -> Self:
        with ExitStack() as unless_begun:
            unless_begun.callback(run.close)
            trainer = cls(run)
            run.begin(record=record)
            unless_begun.pop_all()
        return trainer

    def train(
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
        run, config = self.run, self.run.config
        reported_at, recent = time.monotonic(), deque[dict[str, Any]](maxlen=RECENT_STEPS)
        with run.world.naming_lost_ranks(run.ranks_lost):
            is_due = run.steps_done > 0 and config.evaluation.is_due(run.steps_done)
            if run.world.control.broadcast(is_due and not run.log.has_evaluation):  # a stop prevented it
                self._evaluate(should_stop, on_evaluation)
                if run.agree(should_stop())[0]:
                    return
            run.clock.end_step()  # earlier time belongs to no step
            for pieces in run.steps():
                self.step(pieces)
                # Once in a while: a report, an evaluation, a checkpoint.
                stop, checkpoint_is_due = run.agree(should_stop())
                is_last = stop or run.steps_done == run.total_steps
                evaluation_is_due = config.evaluation.is_due(run.steps_done) and not stop
                is_logged = run.steps_done % config.log_every == 0
                if is_last or checkpoint_is_due or evaluation_is_due or is_logged:
                    lines, now = run.flush_log(), time.monotonic()
                    recent += lines
                    on_report(report_of(lines, recent, run.total_steps, config, now - reported_at))
                    reported_at = now
                if evaluation_is_due:
                    self._evaluate(should_stop, on_evaluation)
                    is_last |= run.agree(should_stop())[0]
                if is_last or checkpoint_is_due:
                    run.save(is_last=is_last)
                if is_last:
                    return

    def step(self, pieces: Iterable[Batch]) -> None:
        """Make one step: features, state in, loss, state out, gradients, weights.

        pieces: the batch; with `micro_batch` set, its pieces in order. Nothing here reads from the device, except
        fp16's overflow check and, with on_nan = skip, the check for bad values.
        """
        run, config, progress = self.run, self.run.config, self.run.progress
        # Otherwise a bad batch's norms would remain in the running means.
        buffers = [buffer.clone() for buffer in run.encoders.buffers()] if config.on_nan == "skip" else []
        run.seed_random_numbers()
        sample_ids, features = self._encoder.encode(pieces)
        state = run.take(sample_ids)

        with run.clock.computing("forward_backward"):
            outcome = self._outcome(features, state, progress)
        if outcome is None:
            for buffer, before in zip(run.encoders.buffers(), buffers, strict=True):
                buffer.copy_(before)
            self._skip()
            return

        run.put(sample_ids, outcome.state)

        rate = learning_rate(config.optimizer, run.steps_done, run.order.steps_per_epoch, run.total_steps)
        self.optimizer.set_learning_rate(rate)
        self.optimizer.zero_grad()
        with run.clock.computing("forward_backward"):
            self.precision.backward(outcome.loss)
            self._encoder.finish_backward()
            run.clock.end_of_backward()
        with run.clock.computing("optimizer"):
            norm = self.precision.step(self.optimizer, config.optimizer.grad_clip_norm)
            # For the next step's keys. Only here, so that on_nan = skip leaves the momentum network unchanged as well.
            run.encoders.move_momentum(momentum_at(config.model.momentum, run.steps_done + 1, run.total_steps))
            if self.average is not None:
                self.average.follow(run.steps_done + 1)
        self._skipped_in_a_row = 0
        norms = {} if norm is None else {"gradient_norm": norm}
        scalars: dict[str, Scalar] = {"loss": outcome.loss, "learning_rate": rate, **norms, **outcome.metrics}
        run.count_step(scalars)

    def _outcome(self, features: Features, state: Mapping[str, Tensor], progress: Progress) -> Outcome | None:
        """Return the objective's outcome, or None if it is not finite and such steps are skipped."""
        run, (first, second, keys, local) = self.run, features
        skips = run.config.on_nan == "skip"
        if skips and run.world.any_rank(not _all_finite(*features.tensors())):
            return None
        try:
            outcome: Outcome = run.objective(first, second, state, progress, keys, local)
        except FeaturesError as error:
            run.flush_log()  # an earlier step's loss may be the cause
            raise run.not_finite(run.steps_done, f"step {run.steps_done + 1:,}: {error}") from error
        return None if skips and not _all_finite(outcome.loss) else outcome

    def _skip(self) -> None:
        """Leave weights and state unchanged; too many skipped steps in a row end the run."""
        run = self.run
        self._skipped_in_a_row += 1
        step = run.steps_done + 1
        if self._skipped_in_a_row > MAX_SKIPPED:
            run.flush_log()
            why = f"steps {step - MAX_SKIPPED:,} to {step:,} gave values that are not finite"
            raise run.not_finite(run.steps_done, why)
        if run.world.is_first:
            samples = run.samples_after(run.steps_done)
            _log.warning("step %d gave values that are not finite and was skipped. %s", step, samples)
        run.count_step({"loss": None, "skipped": True})

    def _evaluate(self, should_stop: Callable[[], bool], on_evaluation: Callable[[dict[str, Any]], None]) -> None:
        """Score the encoders after this step, once its line is written; the others wait for rank 0's scores."""
        run = self.run
        evaluation, scores = self.evaluation, None
        if evaluation is not None:
            scores = evaluation.scores(self.average or run.encoders, run.steps_done, should_stop)
        if scores is not None and run.world.is_first:
            on_evaluation(run.log.add_evaluation(run.steps_done, scores, averaged=self.average is not None))
        run.world.slow_group.broadcast(None)

    def advice(self) -> list[str]:
        """Return warnings to show before the run begins; empty if there are none."""
        run, config = self.run, self.run.config
        of_norms = batch_norm_advice(run.encoders, run.device, run.world, run.pieces)
        of_evaluation = self.evaluation.notes if self.evaluation else []
        warmup = warmup_steps(config.optimizer, run.order.steps_per_epoch)
        of_rate = [
            f"the run ends after {run.total_steps:,} steps, within its warm-up of {warmup:,}, and optimizer.lr is not "
            "reached: train longer, or set optimizer.warmup to a tenth of the steps"
        ] * (warmup >= run.total_steps)
        of_data = [SYNTHETIC_ADVICE] if config.data.loader == "synthetic" else []
        of_objective = run.objective.advice(config.batch_size, keys=config.model.momentum > 0)
        content = None if config.data.select or config.data.without else run.dataset.index.content  # of all
        if content and isinstance(run.objective, IndividualTemperature):
            of_objective += run.objective.advice_on_repeats(content)
        return of_rate + of_objective + lock_advice(config) + of_norms + of_data + of_evaluation

    def close(self) -> None:
        """Release the run, as `Run.close`."""
        self.run.close()

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.run.__exit__(kind, *error)


class FrozenPass(Trainer):
    """Steps that write the samples' rows and change no weight, with encoders in evaluation mode: `thermopile score`."""

    def __init__(self, run: Run) -> None:
        """As Trainer. Raises ConfigError unless encoders and heads have trained weights."""
        model, heads = run.config.model, run.config.model.head == "none" or has_own_heads(run.config.model)
        if not (run.config.init.run or (heads and starts_trained(model.image) and starts_trained(model.text))):
            raise ConfigError(
                f"{model.image.name} and {model.text.name} would have random weights, or heads with such; score by "
                "a whole CLIP or SigLIP (--model hf:… or open_clip:ARCH:TAG), or by a run (--model RUN)"
            )
        super().__init__(run)

    def step(self, pieces: Iterable[Batch]) -> None:
        """Make one step: features, state in, what the objective says of the samples, state out."""
        run, found = self.run, []
        run.encoders.eval()
        with torch.no_grad():
            for piece in pieces:  # none is encoded a second time, so none is kept
                found.append(OnePiece.encode(self._encoder, [piece]))
            ids, features = zip(*found, strict=True)
            sample_ids = torch.cat(ids)
            state = run.take(sample_ids)
            with run.clock.computing("forward_backward"):
                outcome = self._outcome(joined_features([*features]), state, run.progress)
        if outcome is None:
            self._skip()
            return
        run.put(sample_ids, outcome.state)
        run.count_step({"loss": outcome.loss, **outcome.metrics})

    def advice(self) -> list[str]:
        """Return nothing: advice is on training."""
        return []


def _all_finite(*tensors: Tensor) -> bool:
    """Return whether all values are finite; synchronises with the device."""
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)
