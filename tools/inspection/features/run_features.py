"""The features of a run's samples at the inspected snapshot, made once and then read from the report's directory.

They are of all samples, for neighbours and duplicates, or of samples drawn from those that the run has visited, made in
a minute, for figures that need no more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ....pipeline.errors import DatasetError
from ....pipeline.opening import Dataset
from ....state_store import StateReader
from ....state_store.errors import StateStoreError
from ....state_store.schema import VISITS
from ....storage.files import refuse_link
from ....storage.place import Place
from ....trainer.checkpoints.checkpoint_files import LATEST, checkpoints_in, latest_checkpoint, read_info
from ....trainer.config import TrainConfig
from ....trainer.errors import ConfigError, RunError
from ....trainer.run_directory import RunDirectory, find_checkpoint, load_found
from .. import OnDone
from ..opening import Inspection, read_run
from .features_file import NAME, FeaturesFile, FeaturesOf, UnusableFeaturesError, write_features

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ....trainer.config import Weights
    from ....trainer.encoders import Encoders


DRAWN = "drawn.f16"
"""Of the latest checkpoint; of an older one, `drawn-step-N.f16`."""
DRAWS = 4
"""Times that the two views of a picture are drawn; docs/figures_inspect.md has how well fewer and more agree."""
LEAST_DRAWN, MOST_DRAWN, MOST_AT_END, SECONDS = 4096, 1 << 20, 20_000, 60.0
"""Samples whose features are made at least, at most, and at most when training ends; and how long more are made."""
_CANDIDATES = 4
"""Ids drawn for each one wanted, some of which were never visited."""
_log = logging.getLogger(__name__)


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


def wanted_features(inspection: Inspection, asked: Asked, *, drawn: bool = False) -> tuple[Dataset, Place, FeaturesOf]:
    """Return the dataset, the snapshot's checkpoint, and what determines its features, of all or drawn samples."""
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
    views = 2 * DRAWS if drawn and config.objective.mode == "unimodal" else 0
    of = FeaturesOf(samples=dataset.n, views=views, checkpoint=checkpoint.name, weights=weights, digest=digest)
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


@dataclass(frozen=True)
class SampleFeatures:
    """The features of m samples, in memory or in a file."""

    of: FeaturesOf
    sample_ids: NDArray[np.int64]
    """int64 [m], ascending."""
    rows: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    """Return the features of samples by their places, int64 [k] in 0 … m - 1: float32 [k, sides, d], rows of norm 1."""

    def __len__(self) -> int:
        return len(self.sample_ids)


def visited_features(file: FeaturesFile, reader: StateReader, planted: ArrayLike = ()) -> SampleFeatures:
    """Return features of the visited samples in a file. planted: ids to leave out, whose state is of other captions."""
    ids = np.arange(file.samples) if file.drawn is None else file.drawn
    rows = np.flatnonzero((reader.rows_at(ids, [VISITS])[VISITS] > 0) & ~np.isin(ids, planted))
    return SampleFeatures(file.of, ids[rows], lambda places: file.rows(rows[places]))


def drawn_features(
    inspection: Inspection, folder: Path, asked: Asked, on_progress: OnDone = lambda done, total: None
) -> FeaturesFile:
    """Open the features of all samples, or of enough drawn ones, in `folder` or the run's report; else make drawn ones.

    Of pairs, side 0 holds the pictures' and side 1 the captions'; of images, side 0 the plain pictures' and the others
    those of DRAWS times two views, as the recipe draws them. `asked.samples` of n or more are all.
    Raises RunError if there are none and none are to be made, ConfigError, DatasetError, OSError.
    """
    made_of = wanted_features(inspection, asked, drawn=True)
    latest = latest_checkpoint(inspection.run.checkpoints)
    own = DRAWN if latest and latest.name == made_of[1].name else f"drawn-{made_of[1].name}.f16"
    wanted = LEAST_DRAWN if asked.samples is None else asked.samples
    kept_in = dict.fromkeys((folder, inspection.run.report))
    for path in (place / name for place in kept_in for name in (NAME, own)):
        try:
            kept = FeaturesFile(path, made_of[2])
        except UnusableFeaturesError:
            continue
        if kept.samples >= min(wanted, inspection.state.kept):
            return kept
    if not wanted:
        raise RunError("no features are kept of this snapshot, and none are to be made")
    ids = visited_samples(inspection.state, asked.samples or MOST_DRAWN)
    least = LEAST_DRAWN if asked.samples is None else len(ids)
    folder.mkdir(parents=True, exist_ok=True)
    return _made(inspection, made_of, ids, least, folder / own, asked, on_progress)


def keep_features(run: RunDirectory, on_progress: OnDone = lambda done, total: None) -> None:
    """Make the features of MOST_AT_END drawn samples of a run that has ended, as far as a minute allows.

    Not of a run on fewer than LEAST_DRAWN samples, which `inspect` makes while one waits.
    """
    try:
        inspection = read_run(run)
        reader = inspection.reader
        if reader is None or not inspection.sides or inspection.dataset is None or reader.kept < LEAST_DRAWN:
            return
        ids, own = visited_samples(reader, MOST_AT_END), Asked(allow_code=True)
        refuse_link(run.report)
        run.report.mkdir(parents=True, exist_ok=True)
        _made(inspection, wanted_features(inspection, own, drawn=True), ids, 0, run.report / DRAWN, own, on_progress)
    except (RunError, ConfigError, DatasetError, StateStoreError, OSError, ImportError) as error:  # ffcv may be missing
        _log.warning("no features are kept for `thermopile inspect`, which makes its own: %s", error)


def visited_samples(reader: StateReader, count: int) -> NDArray[np.int64]:
    """Return `count` visited samples in random order, or all if they are fewer; the same ones in every call."""
    random = np.random.default_rng(2027)
    if reader.samples <= _CANDIDATES * count:
        ids = random.permutation(reader.samples)
    else:
        ids = random.choice(reader.samples, _CANDIDATES * count, replace=False, shuffle=True)
    return ids[reader.rows_at(ids, [VISITS])[VISITS] > 0][:count]


def _made(
    inspection: Inspection,
    made_of: tuple[Dataset, Place, FeaturesOf],
    ids: NDArray[np.int64],
    least: int,
    path: Path,
    asked: Asked,
    on_progress: OnDone,
) -> FeaturesFile:
    """Write the features of samples, in this order `least` of them and more while the time lasts."""
    features, begun = list[NDArray[np.float32]](), time.monotonic()
    with closing(checkpoint_features(inspection.config, made_of, ids, asked, on_progress)) as batches:
        for batch in batches:
            features.append(batch)
            done = sum(map(len, features))
            if done >= least and time.monotonic() > begun + SECONDS:
                break
    order = np.argsort(ids[:done])
    write_features(path, made_of[2], [np.concatenate(features)[order]], ids[order])
    return FeaturesFile(path, made_of[2])
