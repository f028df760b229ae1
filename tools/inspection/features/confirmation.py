"""Decide the kind of suspicious samples again, by one forward pass of the run's encoders against drawn negatives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np
from scipy.special import logsumexp

from ....pipeline.errors import DatasetError
from ....state_store.schema import VISITS
from ....trainer.config import RANDOM
from ....trainer.errors import ConfigError, RunError
from .. import HOW_MANY, AsJson, Bools, Float32s, Float64s, Hidden, Int64s, OnDone, named
from ..opening import Inspection, Rows
from ..temperatures.kinds import KIND_NAMES, KIND_SHEET_SAMPLES, MISFIT, STUCK, TOO_FEW_VISITS, Codes, SampleKinds
from ..temperatures.misfits import HALF, wrong_captions
from ..temperatures.survey import Survey
from .run_features import Asked, features_of

MAX_NEGATIVES = 4096
MIN_NEGATIVES, MAX_PLANTED = 16, 2048
ANCHORS_AT_ONCE = 1024
"""Anchors compared with all negatives at once: 16 MB of similarities a view."""
_SEED = 2025


@dataclass(frozen=True)
class Confirmation:
    """Findings of a forward pass about m suspects."""

    checkpoint: str
    """Checkpoint of the encoders: step-N."""
    weights: str
    """`averaged` or `raw`."""
    negatives: int
    """Number of samples that each was compared with."""
    sample_ids: Annotated[Int64s, AsJson(len), named("suspects")]
    """int64 [m], ascending; the next six are in this order."""
    below: float | None
    """Margin up to which half of the captions are expected to be wrong, by planted ones; None with too few of them."""
    misfit: Annotated[Bools, HOW_MANY]
    """bool [m]: the margin is not above `below`; without it, by the state alone."""
    silent: Annotated[Bools, HOW_MANY]
    """bool [m]: on a side, the weights of the sample's negatives sum to less than 0.01, so its gradient is nothing."""
    state_kinds: Hidden[Codes]
    """int8 [m]: their kinds by the state alone."""
    kinds: Hidden[Codes]
    """int8 [m]: their kinds by the forward pass."""
    margin: Hidden[Float32s]
    """float32 [m]: cosine of the pair minus that of its hardest negative, on the side where that is lowest."""

    @property
    def margins(self) -> dict[int, float]:
        return dict(zip(self.sample_ids.tolist(), self.margin.tolist(), strict=True))


Compared = tuple[Float64s, Float32s]
"""Of one side of m suspects against the negatives: log mean_j exp(h_j / tau), and the margin, the similarity of the
positive minus that of the hardest negative, [m] each."""


def confirm(inspection: Inspection, survey: Survey, on_progress: OnDone, asked: Asked) -> Confirmation | None:
    """Embed the survey's suspects and up to 4,096 random visited samples, and decide the suspects' kinds again.

    A stuck sample stays stuck if it is silent, w = g / (s + eps) < 0.01, with g as in training but against these
    negatives. What is not stuck is a misfit if its margin is so low that, by the margins of planted and random samples,
    half of the captions up to it are expected to be wrong; with too few planted, by the state alone. The rest is
    ordinary. Pairs are shown without augmentation, images in two views as the run's recipe draws them.
    Returns None if nothing can be confirmed; the notes get the reason. Raises DamagedChunkError, SnapshotNotFoundError.
    Source of g: iSogCLR (ICML 2023) eq 3, 11, 15, 16.
    """
    try:
        return _confirmed(inspection, survey, asked, on_progress)
    except (RunError, ConfigError, DatasetError, OSError) as error:
        inspection.notes.append(f"No kind is confirmed by a forward pass: {error}")
        return None


def _confirmed(inspection: Inspection, survey: Survey, asked: Asked, on_progress: OnDone) -> Confirmation:
    reader, kinds = inspection.reader, survey.kinds
    if reader is None or kinds is None or not len(kinds.suspects):
        raise RunError(_why_no_suspects(kinds, inspection.config.objective.name))
    suspects, negatives, *_ = ids = compared_ids(survey, kinds, inspection)
    if len(negatives) < MIN_NEGATIVES:
        raise RunError(f"it needs {MIN_NEGATIVES} visited samples, but there are only {len(negatives)}; try later")
    shown, is_paired = np.unique(np.concatenate(ids)), inspection.config.objective.mode == "bimodal"
    of, features = features_of(inspection, shown, 0 if is_paired else 2, asked, on_progress)
    rows = reader.rows_at(suspects, kinds.rules.columns)
    places, others, pictures, captions = (np.searchsorted(shown, each) for each in ids)
    compare = partial(_compare, features, others=others, paired=is_paired)
    compared = compare(places, places, rows=rows)
    silent = _silent(rows, compared, inspection.settings.get("eps") or 0.0)
    below, margin = None, np.minimum.reduce([margin for _, margin in compared.values()])
    misfit = kinds.rules.score(rows) > 0
    if len(pictures):
        each = (compare(*of, rows={}).values() for of in ((others, others), (pictures, captions)))
        random, wrong = (np.sort(np.minimum.reduce([margin for _, margin in sides])) for sides in each)
        if judged := wrong_captions(np.searchsorted(random, wrong, "right"), len(random)):
            below = float([-2.0, *random][judged.longest(HALF)])  # cosines differ by no more
            misfit = margin <= below
    stuck = kinds.rules.is_stuck(rows) & silent
    return Confirmation(
        checkpoint=of.checkpoint,
        weights=of.weights,
        negatives=len(negatives),
        below=below,
        sample_ids=suspects,
        misfit=misfit,
        silent=silent,
        state_kinds=kinds.rules.kinds(rows, suspects),
        kinds=kinds.rules.first_kind(rows, stuck, misfit),
        margin=margin,
    )


def _why_no_suspects(kinds: SampleKinds | None, objective: str) -> str:
    if kinds is None or not kinds.rules.log_s:
        return f"the objective {objective} keeps no log s, by which stuck samples and misfits are found"
    if kinds.rules.why_none:
        return kinds.rules.why_none
    judged = sum(kinds.counts.values()) - kinds.counts[KIND_NAMES[TOO_FEW_VISITS]]
    few = f"no sample has {kinds.rules.least_visits} visits, so none is judged; try later"
    return "no sample looks stuck or like a misfit" if judged else few


def compared_ids(survey: Survey, kinds: SampleKinds, inspection: Inspection) -> tuple[Int64s, ...]:
    """Return ids: of the suspects, ascending; of random visited samples to compare with; of planted ones; of donors."""
    pool, (planted, donors) = survey.pool.sample_ids, inspection.planted
    drawn = np.random.default_rng(_SEED).choice(pool, min(MAX_NEGATIVES, len(pool)), replace=False)
    if RANDOM in inspection.columns:  # nothing was trained on any pair, so random ones do
        planted, donors = drawn, np.roll(drawn, 1)
    some = np.random.default_rng(_SEED).permutation(len(planted))[:MAX_PLANTED]
    return np.sort(kinds.suspects), drawn, planted[some], donors[some]


def _compare(
    features: list[Float32s], places: Int64s, captions: Int64s, *, others: Int64s, rows: Rows, paired: bool
) -> dict[str, Compared]:
    """Compare samples with negatives, both given as rows of `features`, by side of the state. rows: the samples' state.

    captions: rows with the samples' captions, their own or those that they show.
    Pairs: a side's candidates are the negatives' features of the other side. Images: both views are anchors, and both
    views of the negatives candidates.
    """
    first, second = features
    positives = (first[places] * second[captions]).sum(1)
    is_own, ones = (places[:, None] == others) | (captions[:, None] == others), np.ones(len(places), np.float32)
    tau = {side: rows.get(f"{side}/tau", ones) for side in (("image", "text") if paired else ("sample",))}
    if paired:
        return {
            "image": _against(first[places], second[others], positives, is_own, tau["image"]),
            "text": _against(second[captions], first[others], positives, is_own, tau["text"]),
        }
    both, is_either = np.concatenate([first[others], second[others]]), np.tile(is_own, 2)
    one, other = (_against(view[places], both, positives, is_either, tau["sample"]) for view in features)
    return {"sample": (np.logaddexp(one[0], other[0]) - math.log(2), np.minimum(one[1], other[1]))}


def _against(anchors: Float32s, candidates: Float32s, positives: Float32s, own: Bools, tau: Float32s) -> Compared:
    """Compare anchors, float32 [m, d], with candidates [k, d]; own, bool [m, k], leaves candidates out."""
    log_g, margin = np.empty(len(anchors)), np.empty(len(anchors), np.float32)
    for start in range(0, len(anchors), ANCHORS_AT_ONCE):
        rows = slice(start, start + ANCHORS_AT_ONCE)
        h = np.where(own[rows], -np.inf, anchors[rows] @ candidates.T - positives[rows, None])
        log_g[rows] = logsumexp(h / tau[rows, None].astype(np.float64), axis=1) - np.log((~own[rows]).sum(1))
        margin[rows] = -h.max(1)
    return log_g, margin


def _silent(rows: Rows, compared: Mapping[str, Compared], eps: float) -> Bools:
    """Return which samples are silent on a side with tau, bool [m]."""
    from ....trainer.objectives.sogclr import SILENT

    silent = np.zeros(len(rows[VISITS]), np.bool_)
    for side, (log_g, _) in compared.items():
        if f"{side}/tau" in rows:
            log_s = rows[f"{side}/log_s"]
            silent |= log_g - np.logaddexp(log_s, math.log(eps) if eps else -np.inf) < math.log(SILENT)
    return silent


def with_confirmed(kinds: SampleKinds, found: Confirmation) -> SampleKinds:
    """Return the kinds of all samples, those of the suspects by the forward pass."""
    before, after = (np.bincount(codes, minlength=len(KIND_NAMES)) for codes in (found.state_kinds, found.kinds))
    more = dict(zip(KIND_NAMES, (after - before).tolist(), strict=True))
    counts = {name: number + more[name] for name, number in kinds.counts.items()}
    sheets, checked = dict(kinds.sheets), set(found.sample_ids.tolist())
    for code in (STUCK, MISFIT):
        if (name := KIND_NAMES[code]) in sheets:
            own = np.flatnonzero(found.kinds == code)
            first = found.sample_ids[own[np.argsort(found.margin[own], kind="stable")]].tolist()
            others = [id for id in sheets[name] if id not in checked]
            sheets[name] = (first + others)[:KIND_SHEET_SAMPLES]
    confirmed = {name: int(after[code]) for code, name in enumerate(KIND_NAMES) if after[code]}
    return replace(kinds, counts=counts, sheets=sheets, confirmed=confirmed)
