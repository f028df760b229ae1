"""Solve temperatures of samples that a run was not trained on, from the features of its encoders."""

from __future__ import annotations

import numpy as np

from ....pipeline.opening import Dataset
from ....trainer.errors import RunError
from ....trainer.run_directory import RunDirectory, find_checkpoint, load_found
from .. import OnDone
from ..features.drawn import DRAWS, LEAST_DRAWN, Asked, HeldFeatures
from ..features.features_file import FeaturesOf
from ..features.run_features import feature_batches
from ..features.solving import SolvedTemperatures, solved_temperatures
from ..opening import Inspection

_SEED = 2030


def solve_other(
    run: RunDirectory,
    dataset: Dataset,
    at: str,
    asked: Asked,
    rho: float | None,
    on_progress: OnDone = lambda done, total: None,
) -> SolvedTemperatures:
    """Solve temperatures of random samples of another dataset than the run's, against one another.

    at: checkpoint, `latest` or step-N. asked.samples: how many; None: LEAST_DRAWN. rho: None: the run's. Captions get
    the run's own tokens. Raises RunError without a rho, captions or a checkpoint, ConfigError, DatasetError, OSError.
    """
    from ....trainer.evaluation.evaluate import tokenizer_of
    from ....trainer.evaluation.features import restore_encoders

    config = run.config()
    objective, is_paired = config.objective, config.objective.mode == "bimodal"
    if (rho := objective.settings.get("rho") if rho is None else rho) is None:
        raise RunError(f"objective {objective.name} has no rho to solve temperatures at; choose one with --rho")
    if is_paired and dataset.index.mode != "pairs":
        raise RunError(f"{dataset.place} has no captions, which the run compares pictures with")
    ids = np.sort(np.random.default_rng(_SEED).permutation(dataset.n)[: asked.samples or LEAST_DRAWN])
    on_progress(0, len(ids))
    checkpoint, weights = find_checkpoint(run, at), config.model.chosen_weights(asked.weights)
    info, training = load_found(checkpoint)
    tokenizer, sizes, _ = tokenizer_of(run, info, config.data.places) if is_paired else (None, None, b"")
    encoders = restore_encoders(config, checkpoint, training, sizes, weights, allow_code=asked.allow_code)
    views = 0 if is_paired else 2 * DRAWS
    shown = dict.fromkeys([0, views])
    made = [*feature_batches(encoders, dataset, ids, config, shown, on_progress, tokenizer)]
    of = FeaturesOf(samples=dataset.n, views=views, checkpoint=checkpoint.name, weights=weights, digest="0" * 64)
    features = HeldFeatures(of, ids, np.concatenate(made))
    return solved_temperatures(Inspection(run, config, None, dataset, []), features, rho)
