"""The scores of the encoders that a run trains, every so many steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from tokenizers import Tokenizer
from torch import nn

from ...pipeline.dataset import Dataset
from ...pipeline.errors import DatasetError
from ...pipeline.tokenizer import load_tokenizer
from ..config import DataConfig, TrainConfig
from ..encoders import Encoders
from ..errors import ConfigError, RunError
from . import zero_shot
from .bands import Scores
from .evaluate import Evaluation, compared, score_encoders

_log = logging.getLogger(__name__)


class OnlineEvaluation:
    """Scores a run's encoders on a held-out set, and leaves no trace in the training.

    k-NN, retrieval and zero-shot as `evaluate` has them; no probes, whose training may take longer than that of the
    steps between two evaluations.
    """

    def __init__(
        self, sets: Evaluation, data: DataConfig, device: torch.device, tokenizer: Tokenizer | None,
        templates: Sequence[str],
    ) -> None:  # fmt: skip
        self._sets, self._data, self._device = sets, data, device
        self._tokenizer, self._templates = tokenizer, templates

    @classmethod
    def open(cls, config: TrainConfig, dataset: Dataset, device: torch.device) -> Self | None:
        """What the settings of a run on `dataset` ask for, on its device; None where they ask for no evaluation.

        Raises DatasetError where a dataset is missing or they do not fit each other, ConfigError where they have
        nothing to score.
        """
        wanted, tokenizer = config.evaluation, None
        if not wanted.every_steps:
            return None
        test = Dataset(Path(wanted.test))
        sets = compared("", Dataset(Path(wanted.train)) if wanted.train else dataset, test)
        if config.objective.mode == "bimodal" and dataset.index.tokenizer is not None:
            length = dataset.index.tokenizer.context_length
            tokenizer = load_tokenizer(dataset.tokenizer_path, context_length=length)
        if sets.not_classified and (tokenizer is None or test.column("caption").null_count == test.n):
            raise ConfigError(
                f"evaluation.test = {wanted.test!r} gives nothing to score: {sets.not_classified}, and there are no "
                "captions that the run could find; choose another one, or set evaluation.every_steps to 0"
            )
        return cls(sets, config.data, device, tokenizer, wanted.templates or zero_shot.TEMPLATES)

    @property
    def notes(self) -> list[str]:
        """What is odd about the datasets, and what they do not allow."""
        return [f"evaluation while the run trains: {note}" for note in self._sets.notes]

    def scores(
        self, encoders: Encoders, step: int, should_stop: Callable[[], bool]
    ) -> dict[str, dict[str, Scores]] | None:
        """What the encoders score after `step`, as `Evaluation.scores`.

        None where should_stop, which is asked many times a minute, ended it, and where it failed, which is warned of:
        the training may go on.
        """
        sets = self._sets
        result = Evaluation(f"step-{step}", sets.train, sets.test, sets.classes)

        def stop_if_asked(*_: object) -> None:
            if should_stop():
                raise _StoppedError

        try:
            # Not compiled: for its last, smaller batch every encoder would be built once more, which takes minutes.
            with _evaluating(encoders), torch.compiler.set_stance("force_eager"):
                score_encoders(
                    result, encoders, self._data, self._device, self._tokenizer, self._templates, with_probes=False,
                    on_progress=stop_if_asked,
                )  # fmt: skip
        except _StoppedError:
            return None
        except (DatasetError, RunError, OSError) as error:
            _log.warning("the evaluation after step %d failed: %s. Training goes on", step, error)
            return None
        return result.scores


class _StoppedError(Exception):
    """The run is to stop, so nobody waits for the scores."""


@contextmanager
def _evaluating(encoders: nn.Module) -> Iterator[None]:
    """Set to evaluate in the block, and back each module that was not: a part may be frozen all the time."""
    training = [module for module in encoders.modules() if module.training]
    encoders.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
