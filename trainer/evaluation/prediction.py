"""Temperatures that a run's objective predicts for the samples of a dataset outside its training set."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ...pipeline.dataset import Dataset
from ...storage.place import Place
from ..checkpoints.checkpoint_files import CheckpointInfo
from ..config import TrainConfig
from ..encoders import Encoders
from ..errors import RunError
from ..objectives import Objective, objective_class
from ..plugins import is_plugin
from ..run.build import device_named, objective_of, recipe_named
from ..run_directory import RunDirectory, find_checkpoint, load_found
from .evaluate import tokenizer_of
from .features import restore_encoders, streamed_features


def predicts(config: TrainConfig, *, allow_code: bool) -> bool:
    """Return whether the run's objective predicts temperatures; a user's objective only if its code is allowed."""
    name = config.objective.name
    return (allow_code or not is_plugin(name)) and objective_class(name).predicts


@dataclass(frozen=True)
class Predictor:
    """The encoders and the objective of a checkpoint, which predict the temperatures of any dataset's samples."""

    config: TrainConfig
    checkpoint: Place
    info: CheckpointInfo
    encoders: Encoders
    objective: Objective
    tokenizer: Tokenizer | None
    device: torch.device

    @classmethod
    def restore(cls, run: RunDirectory, at: str, *, allow_code: bool) -> Self:
        """Read a checkpoint, `latest` or step-N. The encoders have the trained weights, on which the objective learned.

        Raises RunError if the checkpoint does not exist or does not fit the settings, DatasetError if the run's own
        dataset, whose tokenizer its text encoder needs, is not at its recorded path, ConfigError for code not allowed.
        """
        config = run.config()
        checkpoint = find_checkpoint(run, at)
        info, training = load_found(checkpoint)
        own, advice = (run, info, config.data.places, None), "Its recorded path must lead to it."
        has_texts = config.objective.mode == "bimodal"
        tokenizer, sizes, _ = tokenizer_of(*own, advice) if has_texts else (None, None, None)
        encoders = restore_encoders(config, checkpoint, training, sizes, "raw", allow_code=allow_code)
        objective = objective_of(config)
        try:
            objective.load_state_dict(training["objective"])
        except (KeyError, TypeError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RunError(f"{checkpoint} does not contain the objective in the run's settings ({reason})") from error
        device = device_named("auto")
        return cls(config, checkpoint, info, encoders.to(device), objective.to(device), tokenizer, device)

    def sides(self, dataset: Dataset) -> tuple[str, ...]:
        """Return the sides with predicted temperatures: the captions' only if there are captions."""
        return self.objective.sides[: 1 if dataset.index.mode == "images" else 2]

    def batches(self, dataset: Dataset) -> Iterator[dict[str, NDArray[np.float32]]]:
        """Yield the temperatures of all samples by side, float32 [m], in id order, 256 at a time.

        Pictures are the largest central square, without augmentation; captions are each sample's first, in the tokens
        of the run's own tokenizer. Raises DatasetError for an image that does not decode, RunError for features that
        are not finite.
        """
        view = (recipe_named(self.config.data.recipe), self.config.data.image_size, self.device)
        unit_norm = self.objective.unit_norm
        with closing(streamed_features(self.encoders, dataset, self.tokenizer, *view, unit_norm=unit_norm)) as made:
            for features in made:
                with torch.inference_mode():
                    taus = map(self.objective.predict, self.objective.sides, features)
                    found = [of_side.float().cpu().numpy() for of_side in taus]
                yield dict(zip(self.sides(dataset), found, strict=True))
