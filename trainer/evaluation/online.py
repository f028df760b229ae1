"""Score the encoders during training, at regular steps."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from tokenizers import Tokenizer

from ...pipeline.dataset.tokenizer import load_tokenizer
from ...pipeline.errors import DatasetError
from ...pipeline.opening import Dataset, opened
from ...storage.selection import Selection
from ..config import DataConfig, EvaluationConfig
from ..encoders import Encoders
from ..encoders.own_backbone import evaluating
from ..errors import ConfigError, RunError
from ..objectives.base import full_precision
from ..world import ALONE, World
from .bands import Scores
from .evaluate import Evaluation, compared, score_encoders
from .scoring import TEMPLATES

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnlineEvaluation:
    """Scores a run's encoders on a held-out set without affecting the training; all ranks encode, the first scores.

    k-NN, retrieval and zero-shot as in `evaluate`. No probes: training them may take longer than the steps between two
    evaluations.
    """

    sets: Evaluation
    """Without scores."""
    data: DataConfig
    device: torch.device
    tokenizer: Tokenizer | None
    templates: Sequence[str]
    world: World = ALONE
    selection: Selection | None = None
    """The run's, if `sets.train` is its dataset: samples that it has forgotten are not used as neighbours."""

    @classmethod
    def open(
        cls,
        wanted: EvaluationConfig,
        data: DataConfig,
        mode: str,
        dataset: Dataset,
        device: torch.device,
        world: World = ALONE,
        selection: Selection | None = None,
    ) -> Self | None:
        """Return the evaluation that the settings of a run on `dataset` request, on its device; None without a request.

        data, mode: of the run. selection: the run's, whose files need not be there before the first scores.
        Raises DatasetError if a dataset is missing, ConfigError if there is nothing to score.
        """
        tokenizer = None
        if not wanted.every_steps:
            return None
        test = opened(wanted.test, data.tars)
        sets = compared("", opened(wanted.train, data.tars) if wanted.train else dataset, test)
        if mode == "bimodal" and dataset.index.tokenizer is not None:
            length = dataset.index.tokenizer.context_length
            tokenizer = load_tokenizer(dataset.tokenizer_path, context_length=length)
        is_mute = test.column("caption").null_count == test.n and not sets.named.names
        if sets.not_classified and (tokenizer is None or is_mute):
            raise ConfigError(
                f"evaluation.test = {wanted.test!r} gives nothing to score: {sets.not_classified}, and there are no "
                "captions for the run to retrieve; choose another dataset, or set evaluation.every_steps to 0"
            )
        is_own = sets.train.index.fingerprint == dataset.index.fingerprint
        templates = wanted.templates or TEMPLATES
        return cls(sets, data, device, tokenizer, templates, world, selection if is_own else None)

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
        sets, ranks, failure = self.sets, self.world.slow_group, None
        result = Evaluation(f"step-{step}", sets.train, sets.test, sets.classes)
        if self.selection is not None:
            result.forgotten = self.selection.forgotten
        if self.device.type == "cpu":  # where each rank has its own statistics of batch norms, and the first's count
            parts = (encoders.image, encoders.text)
            ranks.copy_from_first(buffer for part in parts if part is not None for buffer in part.buffers())

        def stop_if_asked(*_: object) -> None:
            if should_stop():
                raise _StoppedError

        try:
            # Not compiled: the smaller last batch would trigger a recompilation of each encoder, which takes minutes.
            # Without the run's TF32, as `thermopile eval` scores.
            with evaluating(encoders), torch.compiler.set_stance("force_eager"), full_precision(self.device.type):
                given = self.data, self.device, self.tokenizer, self.templates
                how: dict[str, Any] = {"on_progress": stop_if_asked, "world": self.world}
                score_encoders(result, encoders, *given, **how)
        except (DatasetError, RunError, OSError) as error:
            failure = error
        stopped = any(ranks.gather(isinstance(failure, _StoppedError)))
        if failure is not None and self.world.is_first and not stopped:
            _log.warning("the evaluation after step %d failed: %s. Training continues", step, str(failure).rstrip("."))
        return None if failure else result.scores


class _StoppedError(RunError):
    """The run is stopping, so nobody waits for the scores."""
