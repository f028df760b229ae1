"""Solve the temperatures of a snapshot's samples, by the features that are kept or those of drawn samples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from ....pipeline.dataset import Dataset
from ....pipeline.errors import DatasetError
from ....storage.place import Place
from ....trainer.errors import ConfigError, RunError
from ....trainer.evaluation.features_file import NAME, FeaturesFile, FeaturesOf, UnusableFeaturesError, write_features
from ....trainer.run_directory import load_found
from ...progress import OnDone
from ..json_fields import Hidden, Shown, named
from ..reading.opening import Inspection
from ..temperatures.solved import Bounds, Solved, solve
from ..temperatures.survey import Survey
from .run_features import wanted_features

if TYPE_CHECKING:
    from ....trainer.encoders.averaging import Weights

DRAWN = "drawn.f16"
OTHERS = 8192
"""Negatives that each sample is compared with: of fewer, ranks and deviations are those of fewer (docs/figures.md)."""
LEAST_DRAWN, SECONDS = 4096, 60.0
"""Samples whose features are made at least, and how long more are made."""
LOWEST, HIGHEST = 1e-3, 10.0
"""Where temperatures are looked for if the objective has no bounds."""
ROWS_AT_ONCE = 8192
_SEED = 2027


@dataclass(frozen=True)
class SolvedTemperatures:
    """The temperatures at which rho binds, of m samples."""

    rho: float
    sample_ids: Annotated[NDArray[np.int64], Shown(len), named("samples")]
    """int64 [m], ascending."""
    sides: Hidden[dict[str, Solved]]
    """By side of the state, float32 [m] each."""
    others: int
    """How many samples each was compared with."""
    checkpoint: str
    weights: str


def solved_temperatures(
    inspection: Inspection,
    survey: Survey,
    folder: Path,
    *,
    rho: float | None = None,
    count: int | None = None,
    weights: Weights | None = None,
    allow_code: bool = False,
    on_progress: OnDone = lambda done, total: None,
) -> SolvedTemperatures | None:
    """Solve the temperatures at the run's rho, or another; None if there are no features to be had, and a note why.

    count: features to make at most where none are kept; None: as many as a minute allows, LEAST_DRAWN at least.
    folder: where they are kept. weights, allow_code: as run_features.
    """
    settings = inspection.config.objective.settings
    rho = rho if rho is not None else settings.get("rho")
    if rho is None:
        return None
    bounds = Bounds(rho, settings.get("tau_min") or LOWEST, settings.get("tau_max") or HIGHEST)
    try:
        features = _features(inspection, survey, folder, count, weights, allow_code, on_progress)
        return _solved(inspection, features, bounds, survey.visited)
    except (RunError, ConfigError, DatasetError, OSError) as error:
        inspection.notes.append(f"No temperatures are solved: {error}")
        return None


def _solved(inspection: Inspection, features: FeaturesFile, bounds: Bounds, population: int) -> SolvedTemperatures:
    """Compare all rows of a file with OTHERS of them; population: of which these were drawn."""
    m = features.samples
    ids = np.arange(m) if features.drawn is None else features.drawn
    chosen = np.random.default_rng(_SEED).permutation(m)[:OTHERS]
    place = np.full(m, -1)
    place[chosen] = np.arange(len(chosen))
    others = [np.ascontiguousarray(side) for side in features.rows(chosen).transpose(1, 0, 2)]
    paired = inspection.config.objective.mode == "bimodal"
    against = {"image": ([0], [1]), "text": ([1], [0])} if paired else {"sample": ([0, 1], [0, 1])}
    parts: dict[str, list[Solved]] = {side: [] for side in against}
    reader = inspection.reader
    for first, block in features.blocks(rows=ROWS_AT_ONCE):
        rows = slice(first, first + len(block))
        for side, (anchors, negatives) in against.items():
            column = f"{side}/tau"
            tau = reader.rows_at(ids[rows], [column])[column] if reader and column in reader.fields else None
            views = [np.ascontiguousarray(block[:, view]) for view in anchors]
            found = solve(
                views, [others[view] for view in negatives], place[rows], bounds, population=population, tau=tau
            )
            parts[side].append(found)
    sides = {side: Solved(*map(np.concatenate, zip(*found, strict=True))) for side, found in parts.items()}
    return SolvedTemperatures(bounds.rho, ids, sides, len(chosen), features.of.checkpoint, features.of.weights)


def _features(
    inspection: Inspection,
    survey: Survey,
    folder: Path,
    count: int | None,
    weights: Weights | None,
    allow_code: bool,
    on_progress: OnDone,
) -> FeaturesFile:
    """Open features that fit, of all samples or of enough drawn ones, or make some."""
    dataset, checkpoint, of = wanted_features(inspection, weights)
    if inspection.config.objective.mode == "unimodal":
        of = of.model_copy(update={"views": 2})
    enough = min(count or LEAST_DRAWN, survey.visited)
    for path in (folder / NAME, folder / DRAWN):
        try:
            kept = FeaturesFile(path, of)
        except UnusableFeaturesError:
            continue
        if kept.samples >= enough:
            return kept
    pool = survey.pool.sample_ids
    asked = np.random.default_rng(_SEED).permutation(pool)[: count or len(pool)]
    made = _made(inspection, dataset, checkpoint, of, asked, count is None, allow_code, on_progress)
    features = np.concatenate(list(made))
    order = np.argsort(asked[: len(features)])
    write_features(folder / DRAWN, of, [features[order]], asked[order])
    return FeaturesFile(folder / DRAWN, of)


def _made(
    inspection: Inspection,
    dataset: Dataset,
    checkpoint: Place,
    of: FeaturesOf,
    asked: NDArray[np.int64],
    in_time: bool,
    allow_code: bool,
    on_progress: OnDone,
) -> Iterator[NDArray[np.float32]]:
    """Yield the features of samples in this order, float32 [up to 256, sides, d]; in_time: until SECONDS are over."""
    from ....trainer.evaluation.features import restore_encoders, some_features
    from ....trainer.run.build import device_named, recipe_named

    config = inspection.config
    _, training = load_found(checkpoint)
    device, done, begun = device_named("auto"), 0, time.monotonic()
    encoders = restore_encoders(
        config, checkpoint, training, dataset.index.tokenizer, of.weights, allow_code=allow_code
    )
    view = (recipe_named(config.data.recipe), config.data.image_size, device)
    with closing(some_features(encoders.to(device), dataset, asked, *view, views=of.views)) as batches:
        for features in batches:
            yield np.stack([of_side.cpu().numpy() for of_side in features], axis=1)
            done += len(features[0])
            on_progress(done, len(asked))
            if in_time and done >= LEAST_DRAWN and time.monotonic() > begun + SECONDS:
                return
