"""Random puts, takes, prefetches, snapshots and resumes, against arrays that are simply assigned to."""

import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from thermopile.state_store import StateReader, StateStore, list_snapshots

SAMPLES, BLOCK_ROWS = 40, 7
FIELDS = {"first/log_s": -math.inf, "second/tau": 0.05}

ids_to_put = st.lists(st.integers(0, SAMPLES - 1), unique=True, max_size=12)
ids_to_take = st.lists(st.integers(0, SAMPLES - 1), max_size=12)
values = st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from([math.nan, math.inf]))


def as_ids(ids):
    return np.array(ids, dtype=np.int64)


class Model:
    """What the store should hold: one array a column, and a copy of them all for every snapshot."""

    def __init__(self):
        self.columns = {name: np.full(SAMPLES, value, dtype=np.float32) for name, value in FIELDS.items()}
        self.columns |= {name: np.zeros(SAMPLES, dtype=np.uint32) for name in ("visits", "last_step")}
        self.refused = 0
        self.snapshots = {}

    def put(self, ids, new, step):
        for place, sample in enumerate(ids):
            row = {name: new[name][place] for name in FIELDS}
            if not all(math.isfinite(value) for value in row.values()):
                self.refused += 1
                continue
            for name, value in row.items():
                self.columns[name][sample] = value
            self.columns["visits"][sample] += 1
            self.columns["last_step"][sample] = step

    def snapshot(self, step):
        self.snapshots[step] = {name: column.copy() for name, column in self.columns.items()}

    def resume(self, step):
        self.snapshots = {kept: columns for kept, columns in self.snapshots.items() if kept <= step}
        self.columns = {name: column.copy() for name, column in self.snapshots[step].items()}
        self.refused = 0


class StoreAgainstArrays(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "state"
        self.store = StateStore.create(self.path, SAMPLES, FIELDS, block_rows=BLOCK_ROWS, dataset_fingerprint="random")
        self.model = Model()
        self.model.snapshot(0)
        self.step = 0
        self.prefetched = []

    @rule(ids=ids_to_put, data=st.data())
    def put(self, ids, data):
        self.step += 1
        new = {name: data.draw(st.lists(values, min_size=len(ids), max_size=len(ids))) for name in FIELDS}
        tensors = {name: torch.tensor(column, dtype=torch.float32) for name, column in new.items()}
        self.store.put(as_ids(ids), tensors, step=self.step)
        self.model.put(ids, new, self.step)

    @rule(ids=ids_to_take)
    def prefetch(self, ids):
        self.store.prefetch(as_ids(ids))
        self.prefetched.append(ids)

    @rule(ids=ids_to_take)
    def take(self, ids):
        taken = self.store.take(as_ids(ids))
        for name, tensor in taken.items():
            np.testing.assert_array_equal(tensor.numpy(), self.model.columns[name][ids], err_msg=name)

    @precondition(lambda self: self.prefetched)
    @rule(data=st.data())
    def take_what_was_prefetched(self, data):
        place = data.draw(st.integers(0, len(self.prefetched) - 1))
        self.take(self.prefetched.pop(place))

    @rule()
    def flush(self):
        self.store.flush()
        assert self.store.refused_rows == self.model.refused

    @precondition(lambda self: self.step > max(self.model.snapshots))
    @rule(waits=st.booleans())
    def snapshot(self, waits):
        future = self.store.snapshot(self.step, epoch=0)
        self.model.snapshot(self.step)
        if waits:
            assert future.result().step == self.step

    @rule(data=st.data())
    def resume(self, data):
        self.store.close()
        step = data.draw(st.sampled_from(sorted(self.model.snapshots)))
        at = "latest" if step == max(self.model.snapshots) else f"step-{step}"
        self.store = StateStore.open(self.path, at=at, samples=SAMPLES, fields=FIELDS, dataset_fingerprint="random")
        self.model.resume(step)
        self.step = step
        self.prefetched = []

    @rule(data=st.data())
    def read_a_snapshot(self, data):
        self.store.flush()
        assert [snapshot.step for snapshot in list_snapshots(self.path)] == sorted(self.model.snapshots)
        step = data.draw(st.sampled_from(sorted(self.model.snapshots)))
        reader = StateReader.open(self.path, f"step-{step}")
        for name, column in self.model.snapshots[step].items():
            np.testing.assert_array_equal(reader.column(name), column, err_msg=name)

    @invariant()
    def no_thread_has_failed(self):
        self.store._check_usable()

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.folder)


TestStoreAgainstArrays = StoreAgainstArrays.TestCase
TestStoreAgainstArrays.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
