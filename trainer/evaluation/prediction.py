"""Temperatures that a run's objective predicts for the samples of a dataset outside its training set."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn import functional as F

from ...pipeline.dataset import Dataset
from ...pipeline.tokenizer import encode
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
from .features import BATCH, evaluation_recipe, restore_encoders


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
        tokenizer, sizes = None, None
        if config.objective.mode == "bimodal":
            advice = "Its recorded path must lead to it."
            tokenizer, sizes = tokenizer_of(config.data.places, info, advice)
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
        from ...pipeline.loading.ffcv_loader import ViewMaker  # needs ffcv, which training does not

        recipe, sides = evaluation_recipe(recipe_named(self.config.data.recipe)), self.sides(dataset)
        captions = dataset.tables(["caption"], BATCH) if "text" in sides else repeat(None)
        with ViewMaker(dataset, recipe=recipe, image_size=self.config.data.image_size, views=1) as maker:
            for first, table in zip(range(0, dataset.n, BATCH), captions, strict=False):
                pictures = maker.make(np.arange(first, min(first + BATCH, dataset.n)), epoch=0).views[0]
                texts = [] if table is None else [caption or "" for caption in table["caption"].to_pylist()]
                yield dict(zip(sides, self._predicted(pictures, texts), strict=True))

    @torch.inference_mode()
    def _predicted(self, pictures: torch.Tensor, texts: list[str]) -> list[NDArray[np.float32]]:
        """Return the temperatures of pictures, [m, 3, size, size], and of m texts, if there are any."""
        features = [self.encoders.image(pictures.to(self.device))]
        if texts and self.encoders.text is not None and self.tokenizer is not None:
            tokens = torch.from_numpy(encode(self.tokenizer, texts).tokens)
            features.append(self.encoders.text(tokens.to(self.device)))
        found = []
        for side, of_side in zip(self.objective.sides, features, strict=False):
            given = F.normalize(of_side.float(), dim=1) if self.objective.unit_norm else of_side.float()
            if not given.isfinite().all():
                raise RunError(
                    f"the encoders of {self.checkpoint} give features that are not finite; "
                    "choose an older checkpoint with --at"
                )
            found.append(self.objective.predict(side, given).float().cpu().numpy())
        return found
