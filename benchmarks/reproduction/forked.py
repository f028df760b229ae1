"""Forks of a run on glyphs, 20 % of whose captions are wrong: without those, without as many others, without a class.

Every run here is a fork, also the one that nothing was changed of. `iSogCLR`'s settings are what its search on wrong
captions chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from thermopile.pipeline.opening import Dataset

from .plan import BATCH, EPOCHS, FORKED_AT, FORKED_WITHOUT, SAMPLES, Run, base_of
from .results import Results
from .schedule import SECONDS, Part, Runs
from .sets import source_indices, train_source
from .wrong import ISOGCLR, compared

SHARE, SEEDS = 20, 5
END = 100
"""A fork here is the finished run."""
POINTS = (0, 25, 50, 75)
"""Percentage of the steps before a fork."""
WITHOUT = ("swapped", "random", "class", "one")
"""What a fork forgets: all wrong captions; as many samples, drawn at random; a class of middle size; one sample."""
QUARTER = (SAMPLES // 8) // (BATCH // 8) * EPOCHS["bimodal"] // 4
"""Steps in a quarter of a run, in 8 canonical shards."""


def parts() -> list[Part]:
    """All forks, seed by seed."""
    return [Part(f"forks, seed {seed}", SECONDS * 0.7, partial(_of_seed, seed)) for seed in range(SEEDS)]


def _of_seed(seed: int, results: Results) -> Runs:
    for each in ((END, ""), *product(POINTS, WITHOUT)):
        yield forked(results, seed, *each)


def forked(results: Results, seed: int, at: int, without: str) -> Run | None:
    """The run that goes on after so many per cent of its steps; None while the settings are not searched."""
    run = compared(ISOGCLR, results, SHARE, seed)
    return None if run is None else run._replace(settings=run.settings | {FORKED_AT: at, FORKED_WITHOUT: without})


def origin_of(run: Run) -> Run:
    """The run that a fork is of, which keeps a checkpoint at every point."""
    kept = {"checkpoint.every_steps": QUARTER, "checkpoint.keep_every": QUARTER}
    settings = {key: value for key, value in run.settings.items() if key not in (FORKED_AT, FORKED_WITHOUT)}
    return run._replace(settings=settings | kept)


def chosen_class(data: str) -> int:
    """The class that is forgotten: the middle one by its number of samples."""
    sizes = np.bincount(train_source(base_of(data)).groups().of_sample)
    return int(np.argsort(sizes, kind="stable")[len(sizes) // 2])


def forgotten(run: Run, train: Dataset) -> NDArray[np.int64]:
    """Return the ids that a fork forgets, ascending, int64 [m]."""
    given, meant = train_source(run.data), train_source(base_of(run.data))
    every = np.arange(len(given))
    is_wrong = np.array([*given.captions(every)]) != np.array([*meant.captions(every)])
    rng = np.random.default_rng([run.settings["seed"], 9])
    match run.settings[FORKED_WITHOUT]:
        case "swapped":
            chosen = np.flatnonzero(is_wrong)
        case "random":
            chosen = rng.choice(every, is_wrong.sum(), replace=False)
        case "class":
            chosen = np.flatnonzero(meant.groups().of_sample == chosen_class(run.data))
        case _:
            chosen = rng.choice(every, 1)
    return np.flatnonzero(np.isin(source_indices(train), chosen))


def write_ids(ids: NDArray[np.int64], file: Path) -> Sequence[str]:
    """Write ids as the commands take them; return the words that name the file."""
    pq.write_table(pa.table({"sample_id": ids}), file)
    return "--without", str(file)
