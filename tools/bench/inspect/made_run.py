"""A run of many samples, made within minutes: nothing is trained, but all that `inspect` reads is real.

One shard is converted and stands in for all of them. Tau rises with the size of the sample's class, as after a
training that worked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ....pipeline.conversion.convert import ConvertSettings, convert
from ....pipeline.dataset import Dataset
from ....state_store import StateStore
from ....trainer.build import create_order, objective_of, resolve
from ....trainer.config import load_config
from ....trainer.run_directory import RunDirectory
from ..progress import counted, say
from ..repeated import repeat_shard
from .pairs import PairSource
from .sizes import SNAPSHOTS, Sizes

_ROWS_AT_ONCE = 1 << 20
_SIDES = ("image", "text")
_BOUNDS = (0.005, 1)
"""Of tau."""
_SPREAD = 0.3
"""Standard deviation of log tau within a class, at the end."""


def make_run(sizes: Sizes, directory: Path) -> Path:
    """Write `directory`/dataset and `directory`/run, and return the run."""
    say(f"converting {sizes.shard_rows:,} pairs, one of {sizes.shards:,} shards")
    convert(PairSource(sizes.shard_rows), directory / "dataset", ConvertSettings())
    repeat_shard(directory / "dataset", sizes.shards)
    return write_run(Dataset(directory / "dataset"), directory / "run")


def write_run(dataset: Dataset, path: Path) -> Path:
    """Write a run of iSogCLR on a dataset of pairs whose shards are all the same, with three snapshots after its start.

    Each puts every row once more, in some steps; the last has tau where it goes.
    """
    tree = {"batch_size": min(1024, dataset.n), "data": {"path": str(dataset.path)}, "objective": {"name": "isogclr"}}
    config = resolve(load_config(tree), dataset)
    objective = objective_of(config)
    run = RunDirectory(path)
    run.create(config)
    start, target = np.log(objective.fields["image/tau"]), _target(dataset)
    pieces = range(0, dataset.n, _ROWS_AT_ONCE)
    with StateStore.create(
        run.state, dataset.n, objective.fields, block_rows=create_order(config, dataset, objective).block_rows,
        dataset_fingerprint=dataset.index.fingerprint,
    ) as store:  # fmt: skip
        for done in counted("making the state", SNAPSHOTS * len(pieces)):
            epoch, piece = divmod(done, len(pieces))
            ids = np.arange(pieces[piece], min(pieces[piece] + _ROWS_AT_ONCE, dataset.n))
            share = (1 + epoch) / SNAPSHOTS
            middle = (1 - share) * start + share * target[ids % len(target)]
            store.put(ids, _rows(int(ids[0]), middle, share * _SPREAD), step=1 + done)
            if piece == len(pieces) - 1:
                store.snapshot(1 + done, epoch=1 + epoch).result()
    return run.path


def _target(dataset: Dataset) -> NDArray[np.float32]:
    """Where log tau goes, by class size, for the rows of a shard, float32 [rows]."""
    groups = next(dataset.tables(["group"], int(dataset.first_id[1])))["group"]
    _, codes, sizes = np.unique(groups.to_numpy().astype(str), return_inverse=True, return_counts=True)
    target: NDArray[np.float32] = np.log(0.02 * sizes[codes] ** 0.25).astype(np.float32)
    return target


def _rows(seed: int, log_tau: NDArray[np.float32], spread: float) -> dict[str, torch.Tensor]:
    """The state of samples whose log tau lies about these, float32 [m], with this standard deviation."""
    random, rows = np.random.default_rng(seed), {}
    for side in _SIDES:
        rows[f"{side}/tau"] = np.exp(log_tau + random.normal(0, spread, len(log_tau))).clip(*_BOUNDS)
        rows[f"{side}/log_s"] = random.normal(-2, 1, len(log_tau))
        rows[f"{side}/u"] = random.normal(0, 0.1, len(log_tau))
    return {name: torch.from_numpy(values.astype(np.float32)) for name, values in rows.items()}
