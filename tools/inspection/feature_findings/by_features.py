"""Findings from a snapshot's features: solved temperatures, their associations, and the kinds of samples."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from ....pipeline.errors import DatasetError
from ....trainer.checkpoints.checkpoint_files import latest_checkpoint
from ....trainer.errors import ConfigError, RunError
from ....trainer.solved_temperatures import Bounds, at_rest
from .. import OnTask
from ..features.run_features import Asked, SampleFeatures, drawn_features, visited_features
from ..features.solving import SolvedTemperatures, compared_views, direction, solved_temperatures
from ..json_fields import AsJson
from ..opening import Inspection
from ..temperatures.associations import Association, associations
from ..temperatures.kinds import KindRules
from ..temperatures.survey import Survey
from .evidence import EvidentKinds, evident_kinds
from .properties import properties

NEAR_OF = {"image": "near_pictures", "text": "near_captions", "sample": "near_pictures"}
"""Side of the state -> near samples by its own features."""
LEAST = 16
"""Samples."""
_AT_REST, _NEGATIVES = 500, 4096
"""Samples for which the update rule is run, and others, of which its batches are drawn."""
_SEED = 2029

Curves = dict[str, dict[float, float | None]]
"""By side and rho, Spearman's correlation of solved temperatures and the number of near samples."""


@dataclass(frozen=True)
class ByFeatures:
    """Figures of the samples whose features were looked at."""

    solved: SolvedTemperatures
    """Of all samples with features."""
    tau: Annotated[
        dict[str, NDArray[np.float32]], AsJson(lambda tau: {side: json_quantiles(of) for side, of in tau.items()})
    ]
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
    solved = solved_temperatures(inspection, features, rho, on_progress=partial(on_progress, "solving temperatures"))
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
    rows, others = np.split(
        drawn[: _AT_REST + _NEGATIVES], [min(_AT_REST, len(features) // 2)]
    )  # none is its own negative
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


def json_quantiles(tau: NDArray[np.float32]) -> dict[str, float | None]:
    """Return quantiles as JSON has them: null for a temperature beyond the highest."""
    shares = (0.05, 0.5, 0.95)
    found = np.quantile(tau, shares, method="nearest").tolist()
    return {f"{share:g}": value if np.isfinite(value) else None for share, value in zip(shares, found, strict=True)}
