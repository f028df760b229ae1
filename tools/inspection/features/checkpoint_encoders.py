"""The encoders that belong to an inspected snapshot, on the CPU, since the run may still be training on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....pipeline.opening import Dataset
from ....state_store import Snapshot
from ....storage.place import Place
from ....trainer.checkpoints.checkpoint_files import LATEST, checkpoints_in
from ....trainer.run_directory import find_checkpoint, load_found
from .. import OnDone
from ..opening import Inspection

if TYPE_CHECKING:
    from torch import Tensor

    from ....trainer.config import TrainConfig, Weights
    from ....trainer.encoders import Encoders


class CheckpointEncoders(NamedTuple):
    """Encoders of a checkpoint, in evaluation mode."""

    encoders: Encoders
    checkpoint: Place
    """That of the snapshot's step, else the latest."""
    weights: Weights
    """Which of the checkpoint's weights they have."""

    def features(
        self,
        config: TrainConfig,
        dataset: Dataset,
        ids: NDArray[np.int64],
        on_progress: OnDone,
        views: Literal[1, 2] = 1,
    ) -> list[Tensor]:
        """Return features of pictures and any captions, or of two views, float32 [m, d] each, rows of norm 1."""
        import torch

        from ....trainer.evaluation.features import sample_features
        from ....trainer.run.build import recipe_named

        view = (recipe_named(config.data.recipe), config.data.image_size, torch.device("cpu"))
        return sample_features(self.encoders, dataset, ids, *view, on_progress, views=views)


def load_encoders(
    inspection: Inspection, snapshot: Snapshot, dataset: Dataset, weights: Weights | None, allow_code: bool, use: str
) -> CheckpointEncoders:
    """Load the encoders of a snapshot's checkpoint. weights, allow_code: as restore_encoders.

    use: what they are used for, in a note if none belongs to the snapshot, such as `its kinds are confirmed by`.

    Raises RunError, ConfigError, OSError.
    """
    from ....trainer.evaluation.features import restore_encoders

    run, config = inspection.run, inspection.config
    weights = config.model.chosen_weights(weights)
    checkpoint = checkpoints_in(run.checkpoints).get(snapshot.step) or find_checkpoint(run, LATEST)
    info, training = load_found(checkpoint)
    encoders = restore_encoders(config, checkpoint, training, dataset.index.tokenizer, weights, allow_code=allow_code)
    if info.snapshot != snapshot.id:
        note = f"No checkpoint belongs to the snapshot {snapshot.tag}: {use} checkpoint {checkpoint.name}."
        inspection.notes.append(note)
    return CheckpointEncoders(encoders, checkpoint, weights)
