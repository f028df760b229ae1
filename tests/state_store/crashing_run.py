"""A run that puts, snapshots and deletes old snapshots until it is killed; test_crash starts it as a process.

Arguments: the store's path, and `resident` or `windowed`.
Prints `ready` once the store is open, then the step of each snapshot once its future has resolved.
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch

from thermopile.state_store import StateStore

SAMPLES, BATCH, BLOCK_ROWS, STEPS_BETWEEN_SNAPSHOTS = 5_000, 256, 500, 3
MEMORY_BUDGETS = {"resident": None, "windowed": 6 * BLOCK_ROWS * 32}
BLOCKS_OF_A_BATCH = 5
FIELDS = {"first/log_s": -math.inf, "first/tau": 0.05, "first/u": 0.0}


def batch_of_step(step):
    """Return the ids and the new rows that step `step` puts: the same in every process."""
    random = np.random.default_rng(step)
    blocks = random.choice(SAMPLES // BLOCK_ROWS, BLOCKS_OF_A_BATCH, replace=False)
    rows = random.choice(BLOCKS_OF_A_BATCH * BLOCK_ROWS, BATCH, replace=False)
    ids = blocks[rows // BLOCK_ROWS] * BLOCK_ROWS + rows % BLOCK_ROWS
    return ids, {name: random.standard_normal(BATCH).astype(np.float32) for name in FIELDS}


def announce(snapshot):
    print(snapshot.result().step, flush=True)


def run(path, kind):
    made_for = {"samples": SAMPLES, "fields": FIELDS, "dataset_fingerprint": "crash"}
    made_for["memory_budget"] = MEMORY_BUDGETS[kind]
    store = (
        StateStore.open(path, **made_for)
        if path.exists()
        else StateStore.create(path, block_rows=BLOCK_ROWS, **made_for)
    )
    print("ready", flush=True)
    step, snapshot = store.last_snapshot.step, None
    while True:
        step += 1
        ids, rows = batch_of_step(step)
        store.take(ids)
        store.put(ids, {name: torch.from_numpy(row) for name, row in rows.items()}, step=step)
        if step % STEPS_BETWEEN_SNAPSHOTS == 0 and (snapshot is None or snapshot.done()):
            snapshot = store.snapshot(step, epoch=0)
            snapshot.add_done_callback(announce)
            store.retain(2)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
