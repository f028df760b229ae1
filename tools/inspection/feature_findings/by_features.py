"""Findings from a snapshot's features: solved temperatures, their associations, and samples' kinds with evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....pipeline.errors import DatasetError
from ....trainer.checkpoints.checkpoint_files import latest_checkpoint
from ....trainer.errors import ConfigError, RunError
from ....trainer.solved_temperatures import Bounds, at_rest
from .. import AsJson, Bools, Float32s, Hidden, Int64s, OnTask, named
from ..features.run_features import Asked, SampleFeatures, drawn_features, visited_features
from ..features.solving import SolvedTemperatures, compared_views, direction, solved_temperatures
from ..opening import Inspection
from ..temperatures.associations import Association, associations, ends_of
from ..temperatures.kinds import (
    BY_FEATURES,
    COPIED,
    CROWDED,
    KIND_NAMES,
    KIND_SHEET_SAMPLES,
    NOT_TOLD_APART,
    ORDINARY,
    RARE,
    Codes,
    KindRules,
)
from ..temperatures.survey import Survey
from .properties import NEAREST, OF_FEATURES, Properties, properties

NEAR_OF = {"image": "near_pictures", "text": "near_captions", "sample": "near_pictures"}
"""Side of the state -> near samples by its own features."""
LEAST = 16
"""Samples."""
_AT_REST, _NEGATIVES = 500, 4096
"""Samples for which the update rule is run, and others, of which its batches are drawn."""
_SEED = 2029
RARE_BY = ("class_size", "rarest_word", "near_pictures", "near_captions")
"""Properties of which little means that few samples are like this one."""
LITTLE = 0.1
"""A rare sample's property is among the lowest tenth."""
APART = 0.5
"""Correlation of two aligned pictures below which they are not alike."""
TOO_NEAR = 0.9
"""Cosine of the three nearest above which a model hardly tells a sample from them."""

Curves = dict[str, dict[float, float | None]]
"""By side and rho, Spearman's correlation of solved temperatures and the number of near samples."""


class Evidence(NamedTuple):
    """Evidence for the kind of a sample."""

    words: str
    nearest: str
    """The ids of the nearest samples, and their cosine."""


@dataclass(frozen=True)
class EvidentKinds:
    """The kinds of m samples whose features were looked at."""

    sample_ids: Annotated[Int64s, AsJson(len), named("samples")]
    """int64 [m], ascending."""
    codes: Hidden[Codes]
    """int8 [m]: by the state alone, unless that is `ordinary`."""
    counts: dict[str, int]
    """Kind -> number of samples; only those that need features."""
    evident: Hidden[dict[str, int]]
    """Kind -> number of samples that are so, whichever kind comes first for them."""
    sheets: dict[str, list[int]]
    """Kind -> ids to show, the most typical first."""
    evidence: Hidden[dict[int, Evidence]]
    """Evidence for the kinds of the samples shown, by id."""
    rare_by: str | None
    """The property by which samples are rare, one of RARE_BY; None if none goes with this run's temperatures."""


@dataclass(frozen=True)
class ByFeatures:
    """Figures of the samples whose features were looked at."""

    solved: SolvedTemperatures
    """Of all samples with features."""
    tau: Annotated[dict[str, Float32s], AsJson(lambda tau: {side: json_quantiles(of) for side, of in tau.items()})]
    """By side, float32 [m], solved, of the samples looked at; in JSON quantiles."""
    moves: dict[str, float]
    """By side, the factor by which the update rule would still move the median temperature while features stay."""
    curves: Annotated[
        Curves, AsJson(lambda curves: {side: {f"{r:g}": c for r, c in of.items()} for side, of in curves.items()})
    ]
    associations: dict[str, list[Association]]
    """By side, the strongest first."""
    kinds: EvidentKinds


def by_features(
    inspection: Inspection, survey: Survey, folder: Path, asked: Asked, rho: float | None, on_progress: OnTask
) -> ByFeatures | None:
    """Solve temperatures at the run's rho, or another, and measure what they go with.

    None if the temperatures collapsed, and where there are no features, or no rho: a note says why. None if the run has
    no checkpoint: noted if a rho or features were asked for.
    folder: where features are kept.
    """
    if survey.kinds and survey.kinds.rules.why_none:
        return None
    is_asked, rho = rho is not None or asked.samples, rho if rho is not None else inspection.settings.get("rho")
    has_encoders = latest_checkpoint(inspection.run.checkpoints) is not None  # a copied state may have none
    if inspection.reader is None or not survey.visited or not (has_encoders or is_asked):
        return None
    try:
        if not has_encoders:
            raise RunError("the run has no checkpoint, whose encoders make features")
        if rho is None:
            name = inspection.config.objective.name
            raise RunError(f"the objective {name} has no rho; choose one with --rho: 1 suits pairs, 0.3 images")
        file = drawn_features(inspection, folder, asked, partial(on_progress, "features"))
        features = visited_features(file, inspection.reader, inspection.planted[0])
        if len(features) < LEAST:
            raise RunError(f"it needs {LEAST} visited samples with features, but there are only {len(features)}")
        return _measured(inspection, survey, features, rho, on_progress)
    except (RunError, ConfigError, DatasetError, OSError) as error:
        inspection.notes.append(f"Temperatures are not solved and kinds that need features are missing: {error}")
        return None


def _measured(
    inspection: Inspection, survey: Survey, features: SampleFeatures, rho: float, on_progress: OnTask
) -> ByFeatures:
    solved = solved_temperatures(inspection, features, rho, None, partial(on_progress, "solving temperatures"))
    found = properties(inspection, features, survey.pool, on_progress)
    tau = {side: of_side.tau[found.places] for side, of_side in solved.sides.items()}
    goes_with, rules = dict[str, list[Association]](), KindRules.of(inspection)
    for side, of_side in tau.items():  # of near samples only those by its own features
        others = {*NEAR_OF.values()} - {NEAR_OF[side]}
        asked = {name: values for name, values in found.values.items() if name not in others}
        groups = {} if found.classes is None else {"class_size": found.classes}
        goes_with[side] = associations(of_side, asked, NEAR_OF[side], groups)
    of_state = rules.kinds(inspection.state.rows_at(found.sample_ids, rules.columns), found.sample_ids)
    kinds = evident_kinds(found, tau, goes_with, of_state)
    near = {side: found.values[NEAR_OF[side]] for side in tau}
    curves = direction(inspection, features, near, found.places)
    return ByFeatures(solved, tau, _moves(inspection, features, solved), curves, goes_with, kinds)


def _moves(inspection: Inspection, features: SampleFeatures, solved: SolvedTemperatures) -> dict[str, float]:
    """Run the update rule on the features of some samples.

    Empty for a rho that is not the run's, an objective without the rule, and while its gamma still falls.
    """
    config, settings, reader = inspection.config, inspection.settings, inspection.reader
    has_rule = {"gamma", "grad_clip", "eta", "tau_min", "tau_max"} <= set(settings)
    if settings.get("rho") != solved.rho or reader is None or not solved.learned or not has_rule:
        return {}
    gamma = settings["gamma"]
    if settings.get("gamma_schedule") == "cosine":
        if reader.snapshot.epoch < (settings["gamma_decay_epochs"] or max(1, config.epochs // 2)):
            return {}
        gamma = settings["gamma_min"]
    drawn = np.random.default_rng(_SEED).permutation(len(features))
    # None is its own negative.
    rows, others = np.split(drawn[: _AT_REST + _NEGATIVES], [min(_AT_REST, len(features) // 2)])
    bounds = Bounds(solved.rho, settings["tau_min"], settings["tau_max"])
    own, against, moves = features.rows(rows), features.rows(others), dict[str, float]()
    for side, anchors, negatives in {side: (side, a, n) for side, a, n in compared_views(features)}.values():
        positive = (own[:, anchors[0]] * own[:, negatives[-1]]).sum(1)
        columns = np.concatenate([against[:, view] for view in negatives])
        h = np.concatenate([own[:, view] @ columns.T for view in anchors], axis=1) - positive[:, None]
        in_batch, learned = (config.batch_size - 1) * len(anchors) * len(negatives), solved.learned[side][rows]
        rest = at_rest(h, learned, bounds, gamma, settings["grad_clip"], in_batch)
        moves[side] = float(np.exp(np.median(np.log(rest / learned))))
    return moves


def json_quantiles(tau: Float32s) -> dict[str, float | None]:
    """Return quantiles as JSON has them: null for a temperature beyond the highest."""
    shares = (0.05, 0.5, 0.95)
    found = np.quantile(tau, shares, method="nearest").tolist()
    return {f"{share:g}": value if np.isfinite(value) else None for share, value in zip(shares, found, strict=True)}


def evident_kinds(
    found: Properties, tau: Mapping[str, Float32s], associations: Mapping[str, Sequence[Association]], of_state: Codes
) -> EvidentKinds:
    """Decide the kinds of m samples, the first that applies.

    tau: by side, float32 [m], solved. associations: by side, of these temperatures. of_state: int8 [m], as KindRules.

    Crowded: no temperature from tau_min on is low enough. Copied: a near-copy was seen, by the test of `--duplicates`,
    or the same file. Not told apart: the three nearest pictures are TOO_NEAR, and neither those nor their captions are
    alike. Rare: at an end of the temperatures that goes with little of a property of RARE_BY, and with little of it.
    """
    around, copies = found.around["pictures"], found.values["copies"]
    crowded = np.any([of_side == 0 for of_side in tau.values()], axis=0)
    applies: dict[int, Bools] = {CROWDED: crowded, COPIED: copies > 0, NOT_TOLD_APART: _not_told_apart(found)}
    order: dict[int, NDArray[np.floating]] = {CROWDED: -around.near, COPIED: -copies, RARE: around.near}
    order[NOT_TOLD_APART] = -around.similarity[:, -1]
    notable = [  # ends that go with low values of a property of RARE_BY
        (side, each)
        for side, of_side in associations.items()
        for each in of_side
        if each.of in RARE_BY and each.is_notable and each.area < 0.5 and (each.of in OF_FEATURES or each.stands)
    ]
    if rare_by := min(notable, key=lambda one: one[1].area, default=None):
        side, told_by = rare_by
        order[RARE] = values = found.values[told_by.of]
        at_end = ends_of(tau[side])[told_by.end]
        applies[RARE] = at_end & (values <= np.nanquantile(values, LITTLE)) & (values < np.nanmedian(values))
    codes = of_state.copy()
    for code in reversed(applies):
        codes[applies[code] & (of_state == ORDINARY)] = code
    evident = {KIND_NAMES[code]: int(applies[code].sum()) for code in applies}
    counts, sheets, evidence = dict[str, int](), dict[str, list[int]](), dict[int, Evidence]()
    for code in BY_FEATURES:
        places = np.flatnonzero(codes == code)
        shown = places[np.argsort(order[code][places], kind="stable")][:KIND_SHEET_SAMPLES]
        counts[KIND_NAMES[code]] = len(places)
        sheets[KIND_NAMES[code]] = found.sample_ids[shown].tolist()
        for place in shown.tolist():
            evidence[int(found.sample_ids[place])] = _evidence(found, place, code, rare_by and rare_by[1].of)
    return EvidentKinds(found.sample_ids, codes, counts, evident, sheets, evidence, rare_by and rare_by[1].of)


def _not_told_apart(found: Properties) -> Bools:
    around, agreed = found.around["pictures"], found.agreement
    assert agreed is not None
    correlation = agreed.correlation.reshape(-1, NEAREST)
    apart = np.asarray((around.similarity > TOO_NEAR).all(1) & (correlation < APART).all(1))
    if found.words:
        for place in np.flatnonzero(apart).tolist():
            others = [found.words[other] for other in around.nearest[place].tolist()]
            apart[place] = not any(found.words[place] & other for other in others)
    return apart


def _evidence(found: Properties, place: int, code: int, rare_by: str | None) -> Evidence:
    captions = rare_by == "near_captions" and code == RARE
    around = found.around["captions" if captions else "pictures"]
    similar = ", ".join(f"{similarity:.2f}" for similarity in around.similarity[place])
    nearest = f"ids {', '.join(map(str, found.sample_ids[around.nearest[place]].tolist()))}, cosine {similar}"
    words = f"{around.near[place]:,.0f} of {len(found.places):,} are near"
    if code == COPIED:
        copies = f"{found.values['copies'][place]:,.0f}"
        words = f"{copies} near-cop{'y' if copies == '1' else 'ies'}"
    elif code == NOT_TOLD_APART:
        words += ", and the nearest do not look alike"
    elif code == RARE and rare_by == "class_size" and found.classes is not None:
        size = f"{found.values['class_size'][place]:,.0f}"
        words = f"“{found.class_names[found.classes[place]]}” has {size} sample{'s' * (size != '1')}"
    elif code == RARE and rare_by == "rarest_word":
        count = f"{found.values['rarest_word'][place]:,.0f}"
        words = f"“{found.rarest[place]}” stands in {count} caption{'s' * (count != '1')}"
    return Evidence(words, nearest)
