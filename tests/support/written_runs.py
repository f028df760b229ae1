"""Runs whose rows of state are given: nothing is trained."""

from functools import partial

import numpy as np
import torch

from thermopile.state_store.reader import StateReader
from thermopile.state_store.store import StateStore
from thermopile.trainer.config import load_config
from thermopile.trainer.objectives import create_objective
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run.own_dataset import keep_facts
from thermopile.trainer.run_directory import RunDirectory

STEP = 5


def run_without_state(path, dataset, planted=0.0, **objective):
    """Write the settings of a run; return its directory and the objective's fields."""
    run = RunDirectory(path)
    data = {"path": str(dataset.path), "image_size": 32, "planted": planted}
    config = resolve(load_config({"batch_size": 16, "data": data, "objective": objective}), dataset)[0]
    run.create(config, partial(keep_facts, run, dataset))
    return run, create_objective(config.objective.name, mode=config.objective.mode, **config.objective.settings).fields


def put(store, fields, columns, ids, step):
    """Put rows of these ids; the fields that `columns` has not are 0."""
    rows = {name: torch.zeros(len(ids)) for name in fields}
    rows |= {name: torch.tensor(values, dtype=torch.float32)[ids] for name, values in columns.items()}
    store.put(ids, rows, step=step)


def tau_of(taus):
    return {f"{side}/tau": tau for side, tau in taus.items()}


def write_run(path, dataset, taus, *, visited=None, visits=1, objective="isogclr", snapshot=True):
    """Write a run of `dataset` at `path`; taus maps a side to the tau of every sample, of which `visited` are put."""
    run, fields = run_without_state(path, dataset, name=objective)
    if snapshot:
        identity = {"fields": fields, "dataset_fingerprint": dataset.index.fingerprint}
        with StateStore.create(run.state, dataset.n, block_rows=16, **identity) as store:
            ids = np.arange(dataset.n) if visited is None else np.flatnonzero(visited)
            if len(ids):
                for _ in range(visits):
                    put(store, fields, tau_of(taus), ids, STEP)
                store.snapshot(STEP, epoch=1).result()
    return run


def write_state(path, dataset, columns, visits, block_rows=64, **objective):
    """Write a run of `dataset` whose rows are given: `columns` maps fields to float32 [n], the others are 0.

    visits: int [n]. objective: its name and settings, and `planted`, as data.planted.
    """
    run, fields = run_without_state(path, dataset, **{"name": "isogclr"} | objective)
    identity = {"fields": fields, "dataset_fingerprint": dataset.index.fingerprint}
    with StateStore.create(run.state, dataset.n, block_rows=block_rows, **identity) as store:
        for visit in range(max(visits)):
            put(store, fields, columns, np.flatnonzero(np.asarray(visits) > visit), STEP)
        store.snapshot(STEP, epoch=1).result()
    return run


def train_on(run, taus, step, visited=None):
    """Go on with a run that was written: put the tau of the samples in `visited`, and take a snapshot."""
    reader = StateReader.open(run.state)
    identity = {"samples": reader.samples, "dataset_fingerprint": reader.dataset_fingerprint}
    with StateStore.open(run.state, fields=reader.initial, **identity) as store:
        ids = np.arange(reader.samples) if visited is None else np.flatnonzero(visited)
        put(store, reader.fields, tau_of(taus), ids, step)
        store.snapshot(step, epoch=1).result()
