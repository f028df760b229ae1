"""Solve the temperatures of a snapshot's samples, or of another dataset's, from their features."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ....pipeline.opening import Dataset
from ....trainer.errors import RunError
from ....trainer.run_directory import RunDirectory, find_checkpoint
from ....trainer.solved_temperatures import Bounds, Solved, solve
from .. import AsJson, Float32s, Float64s, Hidden, Int64s, OnDone, named, silent
from ..opening import Inspection
from .features_file import FeaturesOf
from .run_features import DRAWS, LEAST_DRAWN, Asked, SampleFeatures, checkpoint_features

OTHERS = 8192
"""Negatives that each sample is compared with; with fewer, ranks and deviations get worse (docs/figures_inspect.md)."""
LOWEST, HIGHEST = 1e-3, 10.0
"""Bounds of solved temperatures if the objective has none."""
FEATURES_READ_AT_ONCE = 8192
RHOS = (0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 4.0)
"""At which the direction of a run's temperatures is looked at."""


@dataclass(frozen=True)
class SolvedTemperatures:
    """The temperatures at which rho binds, of m samples."""

    rho: float
    sample_ids: Annotated[Int64s, AsJson(len), named("samples")]
    """int64 [m], ascending."""
    sides: Hidden[dict[str, Solved]]
    """By side of the state, float32 [m] each."""
    learned: Hidden[dict[str, Float32s]]
    """By side, float32 [m]: tau of the snapshot; empty if the objective has none."""
    others: int
    """How many samples each was compared with."""
    checkpoint: str
    weights: str

    def at_learned(self, side: str) -> tuple[float, float] | None:
        """Return the medians of tau / tau_solved and of KL at the learned tau; None without one."""
        if side not in self.learned:
            return None
        solved = self.sides[side]
        inside = (solved.tau > 0) & np.isfinite(solved.tau)
        ratio = self.learned[side][inside] / solved.tau[inside]
        return float(np.median(ratio)) if inside.any() else math.nan, float(np.median(solved.divergence))


def solved_temperatures(
    inspection: Inspection, features: SampleFeatures, rho: float, places: Int64s | None, on_progress: OnDone
) -> SolvedTemperatures:
    """Solve the temperatures of all samples with features, or of those at chosen places, int64 [m], against OTHERS.

    Pairs: each side against the other. Images: two views, one softmax over both and those of the others, as the loss
    pools them; of several draws of the views, the mean of log tau. Raises RunError for a damaged file.
    """
    places = np.arange(len(features)) if places is None else places
    ids = features.sample_ids[places]
    settings, reader = inspection.settings, inspection.reader
    bounds = Bounds(rho, settings.get("tau_min") or LOWEST, settings.get("tau_max") or HIGHEST)
    chosen = np.random.default_rng(2028).permutation(len(features))[:OTHERS]
    own = np.full(len(features), -1)
    own[chosen] = np.arange(len(chosen))
    population = reader.kept if reader else features.of.samples
    others = [np.ascontiguousarray(side) for side in features.rows(chosen).transpose(1, 0, 2)]
    columns = [f"{side}/tau" for side in inspection.sides]
    state = reader.rows_at(ids, columns) if reader and columns else {}
    learned = {side: state[f"{side}/tau"] for side in inspection.sides}
    parts: dict[str, list[Solved]] = {side: [] for side, *_ in compared_views(features)}
    for first in range(0, len(places), FEATURES_READ_AT_ONCE):
        here = slice(first, first + FEATURES_READ_AT_ONCE)
        block = features.rows(places[here])
        found: dict[str, list[Solved]] = {side: [] for side in parts}
        for side, anchors, negatives in compared_views(features):
            views = [np.ascontiguousarray(block[:, view]) for view in anchors]
            tau = learned[side][here] if side in learned else None
            against = [others[view] for view in negatives]
            found[side].append(solve(views, against, own[places[here]], bounds, population=population, tau=tau))
        for side, draws in found.items():
            parts[side].append(_mean(draws, bounds))
        on_progress(min(first + FEATURES_READ_AT_ONCE, len(places)), len(places))
    sides = {side: Solved(*map(np.concatenate, zip(*found, strict=True))) for side, found in parts.items()}
    return SolvedTemperatures(rho, ids, sides, learned, len(chosen), features.of.checkpoint, features.of.weights)


def compared_views(features: SampleFeatures) -> list[tuple[str, list[int], list[int]]]:
    """Return side of the state, sides of the file that are its anchors, and those of the others, once for each draw."""
    if not features.of.views:
        return [("image", [0], [1]), ("text", [1], [0])]
    pairs = [[view, view + 1] for view in range(1, features.of.views, 2)]
    return [("sample", pair, pair) for pair in pairs]


def _mean(draws: list[Solved], bounds: Bounds) -> Solved:
    """Return the mean over draws; where all lie beyond the same bound, so does it."""
    taus = np.stack([draw.tau for draw in draws])
    tau = np.exp(np.log(taus.clip(bounds.lowest, bounds.highest)).mean(0))
    tau[(taus == 0).all(0)], tau[np.isinf(taus).all(0)] = 0, np.inf
    return Solved(tau.astype(np.float32), np.mean([draw.divergence for draw in draws], axis=0))


def direction(
    inspection: Inspection, features: SampleFeatures, near: Mapping[str, Float64s], places: Int64s
) -> dict[str, dict[float, float | None]]:
    """Return Spearman's correlation of solved temperatures and the number of near samples, by side and rho.

    None where either is the same for all. near: by side, float64 [m], of the samples at these places, int64 [m].
    """
    from scipy.stats import spearmanr

    some = slice(0, 1500)
    found: dict[str, dict[float, float | None]] = {}
    for rho in RHOS:
        for side, solved in solved_temperatures(inspection, features, rho, places[some], silent).sides.items():
            differ = min(len(np.unique(values)) for values in (solved.tau, near[side][some])) > 1
            correlation = float(spearmanr(solved.tau, near[side][some]).statistic) if differ else None
            found.setdefault(side, {})[rho] = correlation
    return found


def solve_other(
    run: RunDirectory, dataset: Dataset, at: str, asked: Asked, rho: float | None, on_progress: OnDone = silent
) -> SolvedTemperatures:
    """Solve temperatures of random samples of another dataset than the run's, against one another.

    at: checkpoint, `latest` or step-N. asked.samples: how many; None: LEAST_DRAWN. rho: None: the run's. Captions get
    the run's own tokens. Raises RunError without a rho, captions or a checkpoint, ConfigError, DatasetError, OSError.
    """
    config = run.config()
    objective, is_paired = config.objective, config.objective.mode == "bimodal"
    if (rho := objective.settings.get("rho") if rho is None else rho) is None:
        raise RunError(f"objective {objective.name} has no rho to solve temperatures at; choose one with --rho")
    if is_paired and dataset.index.mode != "pairs":
        raise RunError(f"{dataset.place} has no captions, which the run compares pictures with")
    ids = np.sort(np.random.default_rng(2030).permutation(dataset.n)[: asked.samples or LEAST_DRAWN])
    checkpoint, weights = find_checkpoint(run, at), config.model.chosen_weights(asked.weights)
    views = 0 if is_paired else 2 * DRAWS
    of = FeaturesOf(samples=dataset.n, views=views, checkpoint=checkpoint.name, weights=weights, digest="0" * 64)
    tokens_of = run if is_paired else None
    made = checkpoint_features(config, (dataset, checkpoint, of), ids, asked, on_progress, tokens_of=tokens_of)
    features = SampleFeatures(of, ids, np.concatenate([*made]).__getitem__)
    return solved_temperatures(Inspection(run, config, None, dataset, []), features, rho, None, silent)
