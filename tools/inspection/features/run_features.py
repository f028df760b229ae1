"""The features of all samples of a run at the inspected snapshot: made once, then read from the report's directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....pipeline.opening import Dataset
from ....storage.place import Place
from ....trainer.checkpoints.checkpoint_files import LATEST, checkpoints_in, read_info
from ....trainer.config import TrainConfig
from ....trainer.errors import RunError
from ....trainer.run_directory import find_checkpoint, load_found
from .. import OnDone
from ..opening import Inspection
from .features_file import NAME, FeaturesFile, FeaturesOf, UnusableFeaturesError, write_features

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ....trainer.config.sections import Weights
    from ....trainer.encoders import Encoders


class Asked(NamedTuple):
    """Which features to make where none are kept that suffice."""

    samples: int | None = None
    """At most; 0: none. None: as many as a minute allows, LEAST_DRAWN at least."""
    weights: Weights | None = None
    """None: averaged ones, where the run has them."""
    allow_code: bool = False
    """As restore_encoders."""


DEFAULT = Asked()


def run_features(
    inspection: Inspection, folder: Path, asked: Asked, on_progress: OnDone = lambda done, total: None
) -> FeaturesFile:
    """Open the features of all samples in `folder`, an existing directory; make them first where they do not fit.

    They are those of the checkpoint of the snapshot's step, else of the latest, which is noted.
    Raises RunError, ConfigError, DatasetError, OSError; NotRegularFileError if the file is a link.
    """
    *_, of = made_of = wanted_features(inspection, asked)
    path, ids = folder / NAME, np.arange(of.samples)
    try:
        return FeaturesFile(path, of)
    except UnusableFeaturesError as error:
        if path.exists():
            inspection.notes.append(f"The features were made again: {error}.")
    write_features(path, of, checkpoint_features(inspection.config, made_of, ids, asked, on_progress))
    return FeaturesFile(path, of)


def wanted_features(inspection: Inspection, asked: Asked) -> tuple[Dataset, Place, FeaturesOf]:
    """Return the dataset, the snapshot's checkpoint, and what determines its features."""
    if (dataset := inspection.dataset) is None:
        raise RunError("features need the run's dataset; pass its path with --data")
    run, config, snapshot = inspection.run, inspection.config, inspection.reader and inspection.reader.snapshot
    named = checkpoints_in(run.checkpoints).get(snapshot.step) if snapshot else None
    checkpoint = named or find_checkpoint(run, LATEST)
    info = read_info(checkpoint)
    if info.dataset_fingerprint != dataset.index.fingerprint:
        raise RunError(f"{checkpoint} belongs to another dataset than {dataset.place}; it may be another run's")
    if snapshot and info.snapshot != snapshot.id:
        note = (
            f"No checkpoint belongs to the snapshot {snapshot.tag}: its temperatures are combined "
            f"with the features of checkpoint {checkpoint.name}."
        )
        inspection.notes[:] = dict.fromkeys([*inspection.notes, note])  # it may have been noted before
    weights = config.model.chosen_weights(asked.weights)
    view = config.data.model_dump(mode="json", include={"recipe", "image_size"})
    tree = [info.model_dump(mode="json"), weights, config.model.model_dump(mode="json"), view]
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    of = FeaturesOf(samples=dataset.n, checkpoint=checkpoint.name, weights=weights, digest=digest)
    return dataset, checkpoint, of


def features_of(
    inspection: Inspection, ids: NDArray[np.int64], views: int, asked: Asked, on_progress: OnDone
) -> tuple[FeaturesOf, list[NDArray[np.float32]]]:
    """Return features of samples, at least one, by the snapshot's encoders, float32 [m, d] a side, rows of norm 1.

    views: augmented ones of each picture; 0: the picture itself, and for pairs the caption.
    """
    *_, of = made_of = wanted_features(inspection, asked)
    batches = checkpoint_features(inspection.config, made_of, ids, asked, on_progress, [views])
    return of, list(np.concatenate([*batches]).transpose(1, 0, 2).copy())


def checkpoint_features(
    config: TrainConfig,
    made_of: tuple[Dataset, Place, FeaturesOf],
    ids: NDArray[np.int64],
    asked: Asked,
    on_progress: OnDone,
    views: Iterable[int] | None = None,
) -> Generator[NDArray[np.float32], None, None]:
    """Yield features of samples by a checkpoint's encoders, as feature_batches; made_of: from wanted_features.

    views: None: those of the file that `made_of` describes.
    """
    from ....trainer.evaluation.features import restore_encoders

    dataset, checkpoint, of = made_of
    on_progress(0, len(ids))
    _, training = load_found(checkpoint)
    tokenizer = dataset.index.tokenizer
    encoders = restore_encoders(config, checkpoint, training, tokenizer, of.weights, allow_code=asked.allow_code)
    shown = dict.fromkeys([0, of.views]) if views is None else views
    yield from feature_batches(encoders, dataset, ids, config, shown, on_progress)


def feature_batches(
    encoders: Encoders,
    dataset: Dataset,
    ids: NDArray[np.int64],
    config: TrainConfig,
    views: Iterable[int],
    on_progress: OnDone,
    tokenizer: Tokenizer | None = None,
) -> Generator[NDArray[np.float32], None, None]:
    """Yield features of samples in the order of the ids, float32 [up to 256, sides, d], on the GPU if there is one.

    views: numbers of augmented views of each picture, one after another; 0: the picture itself, and its caption.
    tokenizer: None: the dataset's tokens are used.
    """
    from ....trainer.evaluation.features import some_features
    from ....trainer.run.build import device_named, recipe_named

    device, done = device_named("auto"), 0
    how = (encoders.to(device), dataset, ids, recipe_named(config.data.recipe), config.data.image_size, device)
    with ExitStack() as opened:
        made = [
            opened.enter_context(closing(some_features(*how, views=number, tokenizer=tokenizer))) for number in views
        ]
        for parts in zip(*made, strict=True):
            on_progress(done := done + len(parts[0][0]), len(ids))
            yield np.stack([side.cpu().numpy() for part in parts for side in part], axis=1)
