"""Score the encoders during training, at regular steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...pipeline.dataset.tokenizer import load_tokenizer
from ...pipeline.errors import DatasetError
from ...pipeline.opening import opened
from ..encoders import Encoders
from ..encoders.own_backbone import evaluating
from ..errors import ConfigError, RunError
from ..objectives.base import full_precision
from .bands import Scores
from .evaluate import Evaluation, compared, score_encoders
from .scoring import TEMPLATES

if TYPE_CHECKING:
    from ..run.run import Run

_log = logging.getLogger(__name__)


class OnlineEvaluation:
    """Scores a run's encoders on a held-out set without affecting the training; all ranks encode, the first scores.

    k-NN, retrieval and zero-shot as in `evaluate`. No probes: their training may take longer than the steps between.
    """

    def __init__(self, run: Run) -> None:
        """Open the datasets; a selection's files need not be there before the first scores.

        Raises DatasetError if a dataset is missing, ConfigError if there is nothing to score.
        """
        wanted, tars, dataset, self._run = run.config.evaluation, run.config.data.tars, run.dataset, run
        test = opened(wanted.test, tars)
        self.sets = compared("", opened(wanted.train, tars) if wanted.train else dataset, test)
        """Without scores."""
        self._tokenizer = None
        if run.config.objective.mode == "bimodal" and dataset.index.tokenizer is not None:
            length = dataset.index.tokenizer.context_length
            self._tokenizer = load_tokenizer(dataset.tokenizer_path, context_length=length)
        is_mute = test.column("caption").null_count == test.n and not self.sets.named.names
        if self.sets.not_classified and (self._tokenizer is None or is_mute):
            raise ConfigError(
                f"evaluation.test = {wanted.test!r} gives nothing to score: {self.sets.not_classified}, and there are "
                "no captions for the run to retrieve; choose another dataset, or set evaluation.every_steps to 0"
            )
        # Of its own dataset, samples that it has forgotten are not used as neighbours.
        self._selection = run.selection if self.sets.train.index.fingerprint == dataset.index.fingerprint else None

    @property
    def notes(self) -> list[str]:
        """Problems with the datasets, and methods that they do not allow."""
        return [f"evaluation during training: {note}" for note in self.sets.notes]

    def scores(
        self, encoders: Encoders, step: int, should_stop: Callable[[], bool]
    ) -> dict[str, dict[str, Scores]] | None:
        """Return the scores of the encoders after `step`, as `Evaluation.scores`. Called by all ranks.

        Returns None if should_stop, polled many times a minute, ended it on any rank, or if it failed, which logs a
        warning; the training can continue. On all ranks but the first, None or nothing of use.
        """
        run, sets, ranks, failure = self._run, self.sets, self._run.world.slow_group, None
        result = Evaluation(f"step-{step}", sets.train, sets.test, sets.classes)
        if self._selection is not None:
            result.forgotten = self._selection.forgotten
        if run.device.type == "cpu":  # where each rank has its own statistics of batch norms, and the first's count
            parts = (encoders.image, encoders.text)
            ranks.copy_from_first(buffer for part in parts if part is not None for buffer in part.buffers())

        def stop_if_asked(*_: object) -> None:
            if should_stop():
                raise _StoppedError

        try:
            # Not compiled: the smaller last batch would trigger a recompilation of each encoder, which takes minutes.
            # Without the run's TF32, as `thermopile eval` scores.
            with evaluating(encoders), torch.compiler.set_stance("force_eager"), full_precision(run.device.type):
                given = run.config.data, run.device, self._tokenizer, run.config.evaluation.templates or TEMPLATES
                score_encoders(result, encoders, *given, on_progress=stop_if_asked, world=run.world)
        except (ConfigError, DatasetError, RunError, OSError) as error:
            failure = error
        stopped = any(ranks.gather(isinstance(failure, _StoppedError)))
        if failure is not None and run.world.is_first and not stopped:
            _log.warning("the evaluation after step %d failed: %s. Training continues", step, str(failure).rstrip("."))
        return None if failure else result.scores


class _StoppedError(RunError):
    """The run is stopping, so nobody waits for the scores."""
