"""A run that trains in a windowed order, with snapshots and the deletion of old ones, until a test kills it."""

import math
import os
import time
from dataclasses import replace
from itertools import count

import numpy as np
import torch

from thermopile.pipeline.order.order import Order
from thermopile.state_store.history import INDEX
from thermopile.state_store.store import StateStore

ORDER = Order.create(5_000, 256, seed=1, canonical_shards=2, blocks_per_shard=10, window_blocks=2)
SAMPLES, ROW_BYTES = ORDER.samples, 32
LIVE_BLOCKS = (ORDER.window_blocks + 2) * ORDER.canonical_shards
MEMORY_BUDGETS = {"resident": None, "windowed": LIVE_BLOCKS * ORDER.block_rows * ROW_BYTES}
FIELDS = {"image/log_s": -math.inf, "image/tau": 0.05, "image/u": 0.0}
STEPS_BETWEEN_SNAPSHOTS, STEPS_PREFETCHED = 3, 2


def ids_of_step(step):
    return ORDER.batch_ids(*divmod(step - 1, ORDER.steps_per_epoch))


def batch_of_step(step):
    """Return the ids and the new rows that step `step` puts: the same in every process."""
    random = np.random.default_rng(step)
    return ids_of_step(step), {name: random.standard_normal(ORDER.batch_size).astype(np.float32) for name in FIELDS}


def windows_after(step):
    """The windows of the steps after `step`, numbered as puts are, without end."""
    for epoch in count(step // ORDER.steps_per_epoch):
        first = 1 + epoch * ORDER.steps_per_epoch
        for window in ORDER.windows(epoch):
            if first + window.last_step > step:
                yield replace(window, first_step=first + window.first_step, last_step=first + window.last_step)


class ExpectedState:
    """The columns as the steps 1 … `step` leave them; only ever moves forward."""

    def __init__(self, samples=SAMPLES, fields=FIELDS, batch_of_step=batch_of_step):
        self.step, self._batch_of_step = 0, batch_of_step
        self.columns = {name: np.full(samples, value, dtype=np.float32) for name, value in fields.items()}
        self.columns |= {name: np.zeros(samples, dtype=np.uint32) for name in ("visits", "last_step")}

    def after(self, step):
        assert step >= self.step
        while self.step < step:
            self.step += 1
            ids, rows = self._batch_of_step(self.step)
            for name, row in rows.items():
                self.columns[name][ids] = row
            self.columns["visits"][ids] += 1
            self.columns["last_step"][ids] = self.step
        return self.columns


def run_until_killed(start, path, kind, *environment, snapshots, seconds, seen=lambda: True):
    """Run until `snapshots` are announced, for `seconds` more and until `seen()`, kill; return the announced steps."""
    last_moment = time.monotonic() + 300
    process, connection = start(run, path, kind, *environment)
    assert connection.recv() == "ready"
    announced = [connection.recv() for _ in range(snapshots)]
    time.sleep(seconds)
    while not seen():
        assert time.monotonic() < last_moment, "what the run was to show before it is killed was not seen"
        time.sleep(0.001)
    process.kill()
    process.join()
    try:
        while True:
            announced.append(connection.recv())
    except (EOFError, ConnectionResetError):
        return announced


def assert_columns_equal(read, expected):
    for name, column in expected.items():
        np.testing.assert_array_equal(read(name), column, err_msg=name)


def run(connection, path, kind, environment=None):
    """Say `ready`, then the step of every committed snapshot, until killed. environment: variables to set."""
    os.environ.update(environment or {})
    made_for = {"samples": SAMPLES, "fields": FIELDS, "dataset_fingerprint": "crash"}
    made_for["memory_budget"] = MEMORY_BUDGETS[kind]
    store = (
        StateStore.open(path, **made_for)
        if path.holds(INDEX)
        else StateStore.create(path, block_rows=ORDER.block_rows, **made_for)
    )
    step, snapshot = store.last_snapshot.step, None
    store.expect(windows_after(step))
    for ahead in range(1, STEPS_PREFETCHED + 1):
        store.prefetch(ids_of_step(step + ahead))
    connection.send("ready")
    while True:
        step += 1
        ids, rows = batch_of_step(step)
        store.take(ids)
        store.prefetch(ids_of_step(step + STEPS_PREFETCHED))
        store.put(ids, {name: torch.from_numpy(row) for name, row in rows.items()}, step=step)
        if step % STEPS_BETWEEN_SNAPSHOTS == 0 and (snapshot is None or snapshot.done()):
            snapshot = store.snapshot(step, epoch=0)
            snapshot.add_done_callback(lambda snapshot: connection.send(snapshot.result().step))
            store.retain(2)
