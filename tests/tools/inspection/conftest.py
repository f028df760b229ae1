"""Runs with several snapshots."""

import numpy as np
import pytest
import torch

from thermopile.state_store import StateReader, StateStore


@pytest.fixture
def train_on():
    """Go on with a run that `write_run` wrote: put the tau of the samples in `visited`, and take a snapshot."""

    def put(run, taus, step, visited=None):
        reader = StateReader.open(run.state)
        identity = {"samples": reader.samples, "dataset_fingerprint": reader.dataset_fingerprint}
        with StateStore.open(run.state, fields=reader.initial, **identity) as store:
            ids = np.arange(reader.samples) if visited is None else np.flatnonzero(visited)
            rows = {name: torch.zeros(len(ids)) for name in reader.fields}
            rows |= {f"{side}/tau": torch.tensor(tau, dtype=torch.float32)[ids] for side, tau in taus.items()}
            store.put(ids, rows, step=step)
            store.snapshot(step, epoch=1).result()

    return put
