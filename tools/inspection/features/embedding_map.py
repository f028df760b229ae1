"""t-SNE map of a few thousand embeddings, with the samples' temperatures where they have any."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np

from ....pipeline.errors import DatasetError
from ....trainer.errors import ConfigError, RunError
from ....trainer.evaluation.bands import BANDS, band_of_class
from .. import TO_LIST, AsJson, Bools, Float32s, Hidden, Int64s, OnTask
from ..opening import Inspection
from ..temperatures.correlation import NO_GROUP
from ..temperatures.groups import TauGroups
from ..temperatures.survey import Pool, Survey
from .neighbours import ANCHORS
from .run_features import Asked, features_of

MAX_SAMPLES = 2000
MIN_OF_CLASS = 10
"""Samples drawn of each class first, so that rare classes are visible; fewer if there are very many classes."""
MIN_SAMPLES = 16
MARKED = 30
"""Coldest and hottest samples of each side, at most a tenth of all."""
MAX_CLASSES = 20
"""More cannot be distinguished by colour."""
PERPLEXITY = 30.0
SEED = 2023
_TAU_STRATA = 20
_LEAST_SPREAD = 1e-6


class Points(NamedTuple):
    """One side of the samples on the map: their pictures, or their captions."""

    xy: Float32s
    """float32 [m, 2], no unit: both sides lie in one map."""
    tau: Float32s | None
    """float32 [m]; None if the run has none."""
    coldest: Bools
    """bool [m]: the lowest tau of this side. All False without one or if all are the same, also in `hottest`."""
    hottest: Bools


class Colouring(NamedTuple):
    """How samples are coloured: by class, or by class frequency if there are many classes."""

    names: list[str]
    """Class names, from the data, the largest class first; or head, medium and tail classes."""
    codes: Int64s
    """int64 [m]: each sample's index in `names`, -1 without a class."""
    word: str
    """Noun for one of them."""


@dataclass(frozen=True)
class EmbeddingMap:
    """t-SNE of the features that the objective compares, after the projection heads."""

    checkpoint: str
    """Checkpoint of the encoders: step-N."""
    weights: str
    """Which of the checkpoint's weights the encoders have: `averaged` or `raw`."""
    perplexity: float
    sample_ids: Annotated[Int64s, TO_LIST]
    """int64 [m], ascending."""
    points: Annotated[dict[str, Points], AsJson(lambda sides: {side: at.xy.tolist() for side, at in sides.items()})]
    """Side of the state -> points; without temperatures, the side it would have."""
    colouring: Hidden[Colouring | None]
    """None if the dataset has fewer than two classes or too many."""
    similarity: Hidden[Float32s | None]
    """float32 [m]: cosine similarity of each picture and its caption; None without captions."""


def embedding_map(inspection: Inspection, survey: Survey, on_progress: OnTask, asked: Asked) -> EmbeddingMap | None:
    """Embed up to 2,000 stratified samples and the coldest and hottest of each side, and project them by t-SNE.

    All samples come from the survey's pool, and their classes are the survey's. Returns None if no map can be made; the
    inspection's notes get the reason, and any caveat about a map. Source: iSogCLR (ICML 2023) Figures 5 and 6, right.
    """
    try:
        return _made(inspection, survey, asked, on_progress)
    except (RunError, ConfigError, DatasetError, OSError) as error:
        inspection.notes.append(f"There is no map of the embeddings: {error}")
        return None


def _made(inspection: Inspection, survey: Survey, asked: Asked, on_progress: OnTask) -> EmbeddingMap:
    pool, classes, visited = survey.pool, survey.classes, len(survey.pool.sample_ids)
    if visited < MIN_SAMPLES:
        raise RunError(f"it needs {MIN_SAMPLES} visited samples, but there are only {visited}; try again later")
    ends = {side: _ends(tau) for side, tau in pool.tau.items()}
    places = np.unique(np.concatenate([_stratified(pool, classes), *(end for both in ends.values() for end in both)]))
    ids, embedding = pool.sample_ids[places], partial(on_progress, "embeddings")
    of, features = features_of(inspection, ids, 0, asked, embedding)
    perplexity = min(PERPLEXITY, (len(features) * len(places) - 1) / 3)
    on_progress("t-SNE", 0, 1)
    if features[0].shape[1] < 2 or np.ptp(np.concatenate(features), axis=0).max() < _LEAST_SPREAD:
        raise RunError(f"the encoders of {of.checkpoint} give all samples the same features; choose another with --at")
    from sklearn.manifold import TSNE

    # For rows of norm 1 the squared distance is 2 - 2 cosine.
    tsne = TSNE(perplexity=perplexity, init="pca", learning_rate="auto", random_state=SEED)
    xy: list[Float32s] = np.split(tsne.fit_transform(np.concatenate(features)), len(features))
    on_progress("t-SNE", 1, 1)
    points = {}
    for side, at in zip(ANCHORS[len(features)], xy, strict=True):
        tau, marked = pool.tau.get(side), [np.isin(places, end) for end in ends.get(side, ((), ()))]
        points[side] = Points(at, None if tau is None else tau[places], *marked)
    colouring = _colouring(classes, places)
    similarity = (features[0] * features[1]).sum(1) if len(features) == 2 else None
    return EmbeddingMap(of.checkpoint, of.weights, perplexity, ids, points, colouring, similarity)


def _ends(tau: Float32s) -> tuple[Int64s, Int64s]:
    """Return the indices of the coldest and of the hottest samples; among equals, the first."""
    count = min(MARKED, len(tau) // 10) if np.ptp(tau) else 0
    return np.argsort(tau, kind="stable")[:count], np.argsort(-tau, kind="stable")[:count]


def _stratified(pool: Pool, classes: TauGroups | None) -> Int64s:
    """Return indices of up to MAX_SAMPLES samples of the pool: a few per class, the others drawn from all.

    Without classes, samples are drawn evenly from twenty quantile bins of tau, or without it from all.
    """
    size = len(pool.sample_ids)
    if classes:
        strata = classes.pool_codes
        fewest = max(1, min(MIN_OF_CLASS, MAX_SAMPLES // (2 * len(classes.names))))
    else:
        tau = next(iter(pool.tau.values()), np.empty(size))
        strata = np.empty(size, np.int64)
        strata[np.argsort(tau, kind="stable")] = np.arange(size) * _TAU_STRATA // size
        fewest = MAX_SAMPLES // _TAU_STRATA
    shuffled = np.random.default_rng(SEED).permutation(size)
    by_stratum = np.argsort(strata[shuffled], kind="stable")
    _, starts, sizes = np.unique(strata[shuffled][by_stratum], return_index=True, return_counts=True)
    comes_first = np.empty(size, np.bool_)
    comes_first[by_stratum] = np.arange(size) - np.repeat(starts, sizes) < fewest
    return shuffled[np.argsort(~comes_first, kind="stable")[:MAX_SAMPLES]]


def _colouring(classes: TauGroups | None, places: Int64s) -> Colouring | None:
    if classes is None:
        return None
    codes = classes.pool_codes[places]
    if len(classes.names) <= MAX_CLASSES:
        return Colouring(classes.names, codes, classes.word)
    # NO_GROUP, -1, indexes the last element.
    names, bands = [f"{band} {classes.plural}" for band in BANDS], np.append(band_of_class(classes.sizes), NO_GROUP)
    return Colouring(names, bands[codes], classes.word)
