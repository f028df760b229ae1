"""Decide the kind of suspicious samples again, by one forward pass of the run's encoders against drawn negatives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....pipeline.errors import DatasetError
from ....trainer.errors import ConfigError, RunError
from ...progress import OnDone
from ..json_fields import HOW_MANY, Hidden, Shown, named
from ..reading.opening import Inspection
from ..reading.state_blocks import Rows
from ..temperatures.kinds import KIND_NAMES, KIND_SHEET_SAMPLES, MISFIT, STUCK, Codes, KindRules, SampleKinds
from ..temperatures.survey import Survey
from .checkpoint_encoders import load_encoders

if TYPE_CHECKING:
    from torch import Tensor

    from ....trainer.config.sections import Weights
    from ....trainer.encoders import Encoders

MAX_NEGATIVES = 4096
MIN_NEGATIVES = 16
ROWS_AT_ONCE = 1024
"""Anchors compared with all negatives at once: 16 MB of similarities a view."""
LEAST_LEAD = 1e-5
"""Lead in cosine from which a negative counts as above the positive: equal captions differ by rounding."""
_SEED = 2025


@dataclass(frozen=True)
class Confirmation:
    """What a forward pass says about the suspects, m of them."""

    checkpoint: str
    """Checkpoint of the encoders: step-N."""
    weights: str
    """`averaged` or `raw`."""
    negatives: int
    """Number of samples that each was compared with."""
    sample_ids: Annotated[NDArray[np.int64], Shown(len), named("suspects")]
    """int64 [m], ascending; the next six are in this order."""
    misfit: Annotated[NDArray[np.bool_], HOW_MANY]
    """bool [m]: on every side, a negative is above the positive."""
    silent: Annotated[NDArray[np.bool_], HOW_MANY]
    """bool [m]: on a side, the weights of the sample's negatives sum to less than 0.01, so its gradient is nothing."""
    state_kinds: Hidden[Codes]
    """int8 [m]: their kinds by the state alone."""
    kinds: Hidden[Codes]
    """int8 [m]: their kinds by the forward pass."""
    score: Hidden[NDArray[np.float64]]
    """float64 [m]: mean of log s and log g, summed over the sides; the state's alone without tau."""
    margin: Hidden[NDArray[np.float32]]
    """float32 [m]: cosine of the pair minus that of its hardest negative, on the side where that is lowest."""

    @property
    def margins(self) -> dict[int, float]:
        """By id."""
        return dict(zip(self.sample_ids.tolist(), self.margin.tolist(), strict=True))


class Compared(NamedTuple):
    """One side of the suspects against the negatives, [m] each."""

    log_g: NDArray[np.float64]
    """log mean_j exp(h_j / tau)."""
    margin: NDArray[np.float32]
    """Similarity of the positive minus that of the hardest negative."""


def confirm(
    inspection: Inspection,
    survey: Survey,
    on_progress: OnDone = lambda done, total: None,
    *,
    weights: Weights | None = None,
    allow_code: bool = False,
) -> Confirmation | None:
    """Embed the survey's suspects and up to 4,096 random visited samples, and decide the suspects' kinds again.

    A stuck sample stays stuck if it is silent, w = g / (s + eps) < 0.01, with g as in training but against these
    negatives. What is not stuck is a misfit if on every side a negative is above the positive. The rest is
    ordinary. Pairs are shown without augmentation, images in two views as the run's recipe draws them.
    weights: by default averaged ones, where the run has them. allow_code: as restore_encoders. Runs on the CPU, since
    the run may still be training on the GPU. Returns None if nothing can be confirmed; the notes get the reason.
    Raises DamagedChunkError, SnapshotNotFoundError. Source of g: iSogCLR (ICML 2023) eq 3, 11, 15, 16.
    """
    try:
        return _confirmed(inspection, survey, weights, allow_code, on_progress)
    except (RunError, ConfigError, DatasetError, OSError) as error:
        inspection.notes.append(f"No kind is confirmed by a forward pass: {error}")
        return None


def _confirmed(
    inspection: Inspection, survey: Survey, weights: Weights | None, allow_code: bool, on_progress: OnDone
) -> Confirmation:
    reader, dataset, kinds = inspection.reader, inspection.dataset, survey.kinds
    if reader is None or kinds is None or not len(kinds.suspects):
        raise RunError("no sample looks stuck or like a misfit")
    if dataset is None:
        raise RunError("it needs the run's dataset; pass its path with --data")
    suspects, negatives = compared_ids(survey, kinds)
    if len(negatives) < MIN_NEGATIVES:
        raise RunError(f"it needs {MIN_NEGATIVES} visited samples, but there are only {len(negatives)}; try later")
    use = "its kinds are confirmed by the encoders of"
    found = load_encoders(inspection, reader.snapshot, dataset, weights, allow_code, use)
    rows = reader.rows_at(suspects, kinds.rules.columns)
    shown = np.union1d(suspects, negatives)
    features = _features(inspection, found.encoders, shown, on_progress)
    places, others = np.searchsorted(shown, suspects), np.searchsorted(shown, negatives)
    compared = _compare(features, places, others, rows, paired=found.encoders.text is not None)
    silent, score = _weighed(kinds.rules, rows, compared, inspection.config.objective.settings.get("eps") or 0.0)
    margins = [side.margin for side in compared.values()]
    misfit = np.maximum.reduce(margins) < -LEAST_LEAD
    stuck = kinds.rules.is_stuck(rows) & silent
    return Confirmation(
        checkpoint=found.checkpoint.name,
        weights=found.weights,
        negatives=len(negatives),
        sample_ids=suspects,
        misfit=misfit,
        silent=silent,
        state_kinds=kinds.rules.kinds(rows),
        kinds=kinds.rules.first_kind(rows, stuck, misfit),
        score=score,
        margin=np.minimum.reduce(margins),
    )


def compared_ids(survey: Survey, kinds: SampleKinds) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of the suspects, ascending, and of the random visited samples that they are compared with."""
    pool = survey.pool.sample_ids
    drawn = np.random.default_rng(_SEED).choice(pool, min(MAX_NEGATIVES, len(pool)), replace=False)
    return np.sort(kinds.suspects), drawn


def _features(
    inspection: Inspection, encoders: Encoders, sample_ids: NDArray[np.int64], on_progress: OnDone
) -> list[Tensor]:
    """Return the features of pictures and captions, or of two views, float32 [m, d] each, rows of norm 1."""
    import torch

    from ....trainer.evaluation.features import sample_features
    from ....trainer.run.build import recipe_named

    data, dataset = inspection.config.data, inspection.dataset
    assert dataset is not None
    view = (recipe_named(data.recipe), data.image_size, torch.device("cpu"))
    return sample_features(encoders, dataset, sample_ids, *view, on_progress, views=2 if encoders.text is None else 1)


def _compare(
    features: list[Tensor], places: NDArray[np.int64], others: NDArray[np.int64], rows: Rows, *, paired: bool
) -> dict[str, Compared]:
    """Compare samples with negatives, both given as rows of `features`, by side of the state. rows: the samples' state.

    Pairs: a side's candidates are the negatives' features of the other side. Images: both views are anchors, and both
    views of the negatives candidates.
    """
    import torch

    first, second = features
    positives = (first[places] * second[places]).sum(1)
    is_own = torch.from_numpy(places[:, None] == others)

    def against(side: str, view: Tensor, candidates: Tensor, is_own: Tensor) -> Compared:
        tau = torch.from_numpy(rows.get(f"{side}/tau", np.ones(len(places))))
        return _against(view[places], candidates, positives, is_own, tau)

    if paired:
        return {
            "image": against("image", first, second[others], is_own),
            "text": against("text", second, first[others], is_own),
        }
    both = torch.cat([first[others], second[others]])
    one, other = (against("sample", view, both, is_own.repeat(1, 2)) for view in features)
    log_g = np.logaddexp(one.log_g, other.log_g) - math.log(2)
    return {"sample": Compared(log_g, np.minimum(one.margin, other.margin))}


def _against(anchors: Tensor, candidates: Tensor, positives: Tensor, is_own: Tensor, tau: Tensor) -> Compared:
    """Compare anchors, float32 [m, d], with candidates [k, d]; is_own, bool [m, k], leaves candidates out."""
    log_g, margin = np.empty(len(anchors)), np.empty(len(anchors), np.float32)
    for start in range(0, len(anchors), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        h = (anchors[rows] @ candidates.T - positives[rows, None]).masked_fill_(is_own[rows], -math.inf)
        count = (~is_own[rows]).sum(1)
        log_g[rows] = ((h.double() / tau[rows, None]).logsumexp(1) - count.log()).numpy()
        margin[rows] = -h.amax(1).numpy()
    return Compared(log_g, margin)


def _weighed(
    rules: KindRules, rows: Rows, compared: Mapping[str, Compared], eps: float
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return which samples are silent on a side, bool [m], and their scores, float64 [m]; from the sides with tau."""
    from ....trainer.objectives.sogclr import SILENT

    score = rules.score(rows)
    silent = np.zeros(len(score), np.bool_)
    for side, (log_g, _) in compared.items():
        if f"{side}/tau" in rows:
            log_s = rows[f"{side}/log_s"]
            silent |= log_g - np.logaddexp(log_s, math.log(eps) if eps else -np.inf) < math.log(SILENT)
            score += (log_g - log_s) / 2
    return silent, score


def with_confirmed(kinds: SampleKinds, found: Confirmation) -> SampleKinds:
    """Return the kinds of all samples, those of the suspects by the forward pass."""
    before, after = (np.bincount(codes, minlength=len(KIND_NAMES)) for codes in (found.state_kinds, found.kinds))
    counts = {
        name: kinds.counts[name] + int(after[code] - before[code])
        for code, name in enumerate(KIND_NAMES)
        if name in kinds.counts
    }
    sheets, checked = dict(kinds.sheets), set(found.sample_ids.tolist())
    for code in (STUCK, MISFIT):
        if (name := KIND_NAMES[code]) in sheets:
            own = np.flatnonzero(found.kinds == code)
            first = found.sample_ids[own[np.argsort(-found.score[own], kind="stable")]].tolist()
            others = [id for id in sheets[name] if id not in checked]
            sheets[name] = (first + others)[:KIND_SHEET_SAMPLES]
    confirmed = {name: int(after[code]) for code, name in enumerate(KIND_NAMES) if after[code]}
    return replace(kinds, counts=counts, sheets=sheets, confirmed=confirmed)
