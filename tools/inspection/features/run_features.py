"""The features of a run's samples at the inspected snapshot, made once and then read from the report's directory.

They are of all samples, for neighbours and duplicates, or of samples drawn from those that the run has visited, made in
a minute, for figures that need no more.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ....pipeline.errors import DatasetError
from ....pipeline.opening import Dataset
from ....state_store.errors import StateStoreError
from ....state_store.reader import StateReader
from ....state_store.schema import VISITS
from ....storage.files import refuse_link
from ....storage.place import Place
from ....trainer.checkpoints.checkpoint_files import LATEST, checkpoints_in, latest_checkpoint, read_info
from ....trainer.config import TrainConfig, Weights
from ....trainer.errors import ConfigError, RunError
from ....trainer.run_directory import RunDirectory, find_checkpoint, load_found
from .. import Float32s, Int64s, OnDone, silent
from ..opening import Inspection, read_run
from .features_file import NAME, FeaturesFile, FeaturesOf, UnusableFeaturesError, write_features

DRAWN = "drawn.f16"
"""Of the latest checkpoint; of an older one, `drawn-step-N.f16`."""
DRAWS = 4
"""Times that the two views of a picture are drawn; docs/figures_inspect.md has how well fewer and more agree."""
LEAST_DRAWN, MOST_DRAWN, MOST_AT_END, SECONDS = 4096, 1 << 20, 20_000, 60.0
"""Samples whose features are made at least, at most, and at most when training ends; and how long more are made."""
_CANDIDATES = 4
"""Ids drawn for each one wanted, some of which were never visited."""
_log = logging.getLogger(__name__)

MadeOf = tuple[Dataset, Place, FeaturesOf]
"""Dataset and checkpoint of features, and what else determines them."""


class Asked(NamedTuple):
    """Which features to make where none are kept that suffice."""

    samples: int | None = None
    """At most; 0: none. None: as many as a minute allows, LEAST_DRAWN at least."""
    weights: Weights | None = None
    """None: averaged ones, where the run has them."""
    allow_code: bool = False
    """As restore_encoders."""


DEFAULT = Asked()


def run_features(inspection: Inspection, folder: Path, asked: Asked, on_progress: OnDone = silent) -> FeaturesFile:
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


def wanted_features(inspection: Inspection, asked: Asked, *, drawn: bool = False) -> MadeOf:
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
        combined = f"its temperatures are combined with the features of checkpoint {checkpoint.name}"
        note = f"No checkpoint belongs to the snapshot {snapshot.tag}: {combined}."
        inspection.notes[:] = dict.fromkeys([*inspection.notes, note])  # it may have been noted before
    weights = config.model.chosen_weights(asked.weights)
    view = config.data.model_dump(mode="json", include={"recipe", "image_size"})
    tree = [info.model_dump(mode="json"), weights, config.model.model_dump(mode="json"), view]
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    views = 2 * DRAWS if drawn and config.objective.mode == "unimodal" else 0
    of = FeaturesOf(samples=dataset.n, views=views, checkpoint=checkpoint.name, weights=weights, digest=digest)
    return dataset, checkpoint, of


def features_of(
    inspection: Inspection, ids: Int64s, views: int, asked: Asked, on_progress: OnDone
) -> tuple[FeaturesOf, list[Float32s]]:
    """Return features of samples, at least one, by the snapshot's encoders, float32 [m, d] a side, rows of norm 1.

    views: augmented ones of each picture; 0: the picture itself, and for pairs the caption.
    """
    *_, of = made_of = wanted_features(inspection, asked)
    batches = checkpoint_features(inspection.config, made_of, ids, asked, on_progress, [views])
    return of, list(np.concatenate([*batches]).transpose(1, 0, 2).copy())


def checkpoint_features(
    config: TrainConfig,
    made_of: MadeOf,
    ids: Int64s,
    asked: Asked,
    on_progress: OnDone,
    views: Iterable[int] | None = None,
    tokens_of: RunDirectory | None = None,
) -> Generator[Float32s, None, None]:
    """Yield features of samples in the order of the ids, float32 [up to 256, sides, d], on the GPU if there is one.

    made_of: as from wanted_features. views: numbers of augmented views of each picture, one after another; 0: the
    picture itself, and its caption; None: those of the file that `made_of` describes. tokens_of: a run whose tokenizer
    reads the captions; None: the dataset's tokens are used.
    """
    from ....trainer.evaluation.evaluate import tokenizer_of
    from ....trainer.evaluation.features import restore_encoders, some_features
    from ....trainer.run.build import device_named, recipe_named

    dataset, checkpoint, of = made_of
    on_progress(0, len(ids))
    _, training = load_found(checkpoint)
    tokenizer, sizes = None, dataset.index.tokenizer
    if tokens_of:
        tokenizer, sizes, _ = tokenizer_of(tokens_of)
    encoders = restore_encoders(config, checkpoint, training, sizes, of.weights, allow_code=asked.allow_code)
    device, done = device_named("auto"), 0
    how = (encoders.to(device), dataset, ids, recipe_named(config.data.recipe), config.data.image_size, device)
    with ExitStack() as opened:
        views = dict.fromkeys([0, of.views]) if views is None else views
        made = [opened.enter_context(closing(some_features(*how, views=each, tokenizer=tokenizer))) for each in views]
        for parts in zip(*made, strict=True):
            on_progress(done := done + len(parts[0][0]), len(ids))
            yield np.stack([side.cpu().numpy() for part in parts for side in part], axis=1)


@dataclass(frozen=True)
class SampleFeatures:
    """The features of m samples, in memory or in a file."""

    of: FeaturesOf
    sample_ids: Int64s
    """int64 [m], ascending."""
    rows: Callable[[Int64s], Float32s]
    """Return the features of samples by their places, int64 [k] in 0 … m - 1: float32 [k, sides, d], rows of norm 1."""

    def __len__(self) -> int:
        return len(self.sample_ids)


def visited_features(file: FeaturesFile, reader: StateReader, planted: ArrayLike = ()) -> SampleFeatures:
    """Return features of the visited samples in a file. planted: ids to leave out, whose state is of other captions."""
    ids = np.arange(file.samples) if file.drawn is None else file.drawn
    rows = np.flatnonzero((reader.rows_at(ids, [VISITS])[VISITS] > 0) & ~np.isin(ids, planted))
    return SampleFeatures(file.of, ids[rows], lambda places: file.rows(rows[places]))


def drawn_features(inspection: Inspection, folder: Path, asked: Asked, on_progress: OnDone = silent) -> FeaturesFile:
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
        with suppress(UnusableFeaturesError):
            kept = FeaturesFile(path, made_of[2])
            if kept.samples >= min(wanted, inspection.state.kept):
                return kept
    if not wanted:
        raise RunError("no features are kept of this snapshot, and none are to be made")
    ids = visited_samples(inspection.state, asked.samples or MOST_DRAWN)
    least = LEAST_DRAWN if asked.samples is None else len(ids)
    folder.mkdir(parents=True, exist_ok=True)
    return _made(inspection, made_of, ids, least, folder / own, asked, on_progress)


def keep_features(run: RunDirectory, on_progress: OnDone = silent) -> None:
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


def visited_samples(reader: StateReader, count: int) -> Int64s:
    """Return `count` visited samples in random order, or all if they are fewer; the same ones in every call."""
    random = np.random.default_rng(2027)
    if reader.samples <= _CANDIDATES * count:
        ids = random.permutation(reader.samples)
    else:
        ids = random.choice(reader.samples, _CANDIDATES * count, replace=False, shuffle=True)
    return ids[reader.rows_at(ids, [VISITS])[VISITS] > 0][:count]


def _made(
    inspection: Inspection, made_of: MadeOf, ids: Int64s, least: int, path: Path, asked: Asked, on_progress: OnDone
) -> FeaturesFile:
    """Write the features of samples, in this order `least` of them and more while the time lasts."""
    features, begun = list[Float32s](), time.monotonic()
    with closing(checkpoint_features(inspection.config, made_of, ids, asked, on_progress)) as batches:
        for batch in batches:
            features.append(batch)
            done = sum(map(len, features))
            if done >= least and time.monotonic() > begun + SECONDS:
                break
    order = np.argsort(ids[:done])
    write_features(path, made_of[2], [np.concatenate(features)[order]], ids[order])
    return FeaturesFile(path, made_of[2])
