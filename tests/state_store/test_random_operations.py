"""Random puts, takes, prefetches, snapshots that work or fail, deletions and resumes, against plain arrays.

One suite for every way of holding the rows: all in memory, under a budget, and shared by two ranks either way.
"""

import errno
import math
import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import icechunk
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from thermopile.state_store import commit, durable
from thermopile.state_store.durable import list_snapshots
from thermopile.state_store.errors import SnapshotError
from thermopile.state_store.reader import StateReader
from thermopile.state_store.store import StateStore
from thermopile.storage import files

from support.threads import ThreadRank

SAMPLES, BLOCK_ROWS, MAX_IDS = 66, 5, 6
BLOCKS = -(-SAMPLES // BLOCK_ROWS)
SPLIT = 7 * BLOCK_ROWS
"""Where the second of two ranks begins."""
FIELDS = {"image/log_s": -math.inf, "text/tau": 0.05}
BUDGET = MAX_IDS * BLOCK_ROWS * 32
"""As many blocks as one batch may need, of the 14 or 7 that a rank holds."""

KINDS = {"resident": (1, None), "windowed": (1, BUDGET), "two ranks": (2, None), "two ranks, windowed": (2, BUDGET)}

FAILURES = {
    "the fork": (durable, "fork", lambda world: 1),
    "opening the columns": (commit, "array_of", lambda world: 4 * world),
    "writing a part": (icechunk.IcechunkStore, "set", lambda world: 4 * world),
    "the sync": (files, "sync_file_system", lambda world: world + 1),
    "the merge": (durable, "merge", lambda world: 1),
}
"""What of a snapshot may fail, in the order in which it happens, and how many calls every snapshot makes of it."""
SECONDS_BEHIND = 0.05
"""How long the puts stay queued: enough for a snapshot that fails without waiting for them."""
MAX_FAILURES = 2
"""In one example: each takes as long as many other rules."""

ids_to_put = st.lists(st.integers(0, SAMPLES - 1), unique=True, max_size=MAX_IDS)
ids_to_take = st.lists(st.integers(0, SAMPLES - 1), max_size=MAX_IDS)
values = st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from([math.nan, math.inf]))


@dataclass
class Window:
    first_step: int
    last_step: int
    blocks: np.ndarray


windows = st.lists(
    st.builds(
        Window,
        st.integers(0, 12),
        st.integers(0, 12),
        st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS).map(np.array),
    ),
    max_size=5,
)


@contextmanager
def failing_once(owner, name, spared):
    """Let the disk be full for one call of `owner.name`, after as many as are spared."""
    whole, calls = getattr(owner, name), count()

    def call(*args, **kwargs):
        if next(calls) == spared:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(*args, **kwargs)

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(owner, name, call)
        yield


class SharedStore:
    """The store of one process, or those of two ranks, as one."""

    def __init__(self, kind, open_one):
        world, budget = KINDS[kind]
        owned = [range(SAMPLES)] if world == 1 else [range(SPLIT), range(SPLIT, SAMPLES)]
        ranks = [None] if world == 1 else ThreadRank.both()
        with ThreadPoolExecutor(world) as threads:
            self.stores = list(
                threads.map(lambda own, rank: open_one(owned=own, ranks=rank, memory_budget=budget), owned, ranks)
            )

    def _places(self, store, ids):
        return [place for place, sample in enumerate(ids) if sample in store.owned]

    def prefetch(self, ids):
        for store in self.stores:
            store.prefetch(as_ids([ids[place] for place in self._places(store, ids)]))

    def take(self, ids):
        taken = {}
        for store in self.stores:
            places = self._places(store, ids)
            for name, rows in store.take(as_ids([ids[place] for place in places])).items():
                whole = taken.setdefault(name, np.zeros(len(ids), dtype=rows.numpy().dtype))
                whole[places] = rows.numpy()
        return taken

    def put(self, ids, new, step):
        for store in self.stores:
            places = self._places(store, ids)
            rows = {name: torch.tensor([new[name][p] for p in places], dtype=torch.float32) for name in FIELDS}
            store.put(as_ids([ids[place] for place in places]), rows, step=step)

    def expect(self, windows):
        for store in self.stores:
            first, end = store.owned.start // BLOCK_ROWS, -(-store.owned.stop // BLOCK_ROWS)
            own = [(w, w.blocks[(w.blocks >= first) & (w.blocks < end)].astype(np.int64)) for w in windows]
            store.expect([Window(w.first_step, w.last_step, blocks) for w, blocks in own])

    def snapshot(self, step):
        return [store.snapshot(step, epoch=0) for store in self.stores]

    @contextmanager
    def behind(self):
        """Let the puts and cuts asked for meanwhile stay queued."""
        let_go = threading.Event()
        for store in self.stores:
            store._transfer.thread.submit(let_go.wait)
        try:
            yield
        finally:
            let_go.set()

    def retain(self, keep_last):
        for future in [store.retain(keep_last) for store in self.stores]:
            future.result()

    def flush(self):
        for store in self.stores:
            store.flush()

    def close(self):
        for store in self.stores:
            store.close()

    @property
    def refused_rows(self):
        return sum(store.refused_rows for store in self.stores)


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

    def retain(self, keep_last):
        kept = {0, *sorted(self.snapshots)[-keep_last:]}
        self.snapshots = {step: columns for step, columns in self.snapshots.items() if step in kept}

    def resume(self, step):
        self.snapshots = {kept: columns for kept, columns in self.snapshots.items() if kept <= step}
        self.columns = {name: column.copy() for name, column in self.snapshots[step].items()}
        self.refused = 0


class StoreAgainstArrays(RuleBasedStateMachine):
    first_kind = "resident"

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "state"
        self.store = SharedStore(self.first_kind, self.create)
        self.model = Model()
        self.model.snapshot(0)
        self.step = 0
        self.prefetched = []
        self.snapshots_asked_for = []
        self.failures = 0
        self.opened_at = 0

    def create(self, **share):
        return StateStore.create(
            self.path, SAMPLES, FIELDS, block_rows=BLOCK_ROWS, dataset_fingerprint="random", **share
        )

    @rule(ids=ids_to_put, data=st.data())
    def put(self, ids, data):
        self.step += 1
        new = {name: data.draw(st.lists(values, min_size=len(ids), max_size=len(ids))) for name in FIELDS}
        self.store.put(ids, new, self.step)
        self.model.put(ids, new, self.step)

    @rule(ids=ids_to_take)
    def prefetch(self, ids):
        self.store.prefetch(ids)
        self.prefetched.append(ids)

    @rule(ids=ids_to_take)
    def take(self, ids):
        for name, rows in self.store.take(ids).items():
            np.testing.assert_array_equal(rows, self.model.columns[name][ids], err_msg=name)

    @precondition(lambda self: self.prefetched)
    @rule(data=st.data())
    def take_what_was_prefetched(self, data):
        place = data.draw(st.integers(0, len(self.prefetched) - 1))
        self.take(self.prefetched.pop(place))

    @rule(windows=windows)
    def expect(self, windows):
        """Windows that may or may not come true: they are hints."""
        ahead = [Window(w.first_step + self.step, w.first_step + self.step + w.last_step, w.blocks) for w in windows]
        self.store.expect(sorted(ahead, key=lambda window: window.first_step))

    @rule()
    def flush(self):
        self.store.flush()
        assert self.store.refused_rows == self.model.refused

    @precondition(lambda self: self.step > max(self.model.snapshots))
    @rule(waits=st.booleans())
    def snapshot(self, waits):
        futures = self.store.snapshot(self.step)
        self.snapshots_asked_for += futures
        self.model.snapshot(self.step)
        if waits:
            assert {future.result().step for future in futures} == {self.step}

    @precondition(lambda self: self.failures < MAX_FAILURES)
    @rule(what=st.sampled_from(sorted(FAILURES)), at_once=st.booleans(), data=st.data())
    def a_snapshot_fails_and_the_next_one_holds_everything(self, what, at_once, data):
        """Whatever fails, and whether the puts are in the rows by then or still queued."""
        self.failures += 1
        owner, name, calls = FAILURES[what]
        spared = data.draw(st.integers(0, calls(len(self.store.stores)) - 1))
        wait(self.snapshots_asked_for)
        with failing_once(owner, name, spared):
            with self.store.behind():
                self.put_numbers(range(0, SAMPLES, 3 * BLOCK_ROWS))
                failed = self.store.snapshot(self.step)
                if at_once:
                    self.put_numbers([0])
                    self.snapshot(waits=False)
                wait(failed, timeout=SECONDS_BEHIND)
            assert all(isinstance(future.exception(), SnapshotError) for future in failed)
            if not at_once:
                self.snapshot(waits=True)
            self.store.flush()
        self.assert_snapshot_is_right(self.step)

    @precondition(lambda self: self.failures < MAX_FAILURES and max(self.model.snapshots) > self.opened_at)
    @rule(kind=st.sampled_from(["snapshots/", "manifests/"]), ids=ids_to_take, data=st.data())
    def the_newest_snapshot_is_damaged_and_the_next_one_holds_everything(self, kind, ids, data):
        """One that changed no row has a snapshot of its own, and no manifest."""
        self.failures += 1
        self.store.flush()
        *earlier, newest = list_snapshots(self.path)
        own = sorted(name for name in newest.files if not any(name in each.files for each in earlier))
        of_kind = [name for name in own if name.startswith(kind)] or [
            name for name in own if name.startswith("snapshots/")
        ]
        (self.path / data.draw(st.sampled_from(of_kind))).unlink()
        del self.model.snapshots[newest.step]
        self.take(ids)
        self.put_numbers([0, SPLIT])
        self.snapshot(waits=True)
        self.store.flush()
        assert [snapshot.step for snapshot in list_snapshots(self.path)] == sorted(self.model.snapshots)
        self.assert_snapshot_is_right(self.step)

    def put_numbers(self, ids):
        """Put the step's number into every field; of one row in every third block, so that no rank has nothing."""
        self.step += 1
        new = {name: [float(self.step)] * len(ids) for name in FIELDS}
        self.store.put(ids, new, self.step)
        self.model.put(ids, new, self.step)

    @rule(keep_last=st.integers(1, 3))
    def retain(self, keep_last):
        self.store.retain(keep_last)
        self.model.retain(keep_last)

    @rule(data=st.data(), kind=st.sampled_from(sorted(KINDS)))
    def resume(self, data, kind):
        self.store.close()
        step = data.draw(st.sampled_from(sorted(self.model.snapshots)))
        at = "latest" if step == max(self.model.snapshots) else f"step-{step}"
        self.store = SharedStore(
            kind,
            lambda **share: StateStore.open(
                self.path, at=at, samples=SAMPLES, fields=FIELDS, dataset_fingerprint="random", **share
            ),
        )
        self.model.resume(step)
        self.step = self.opened_at = step
        self.prefetched = []
        self.snapshots_asked_for = []

    @rule(data=st.data())
    def read_a_snapshot(self, data):
        self.store.flush()
        assert [snapshot.step for snapshot in list_snapshots(self.path)] == sorted(self.model.snapshots)
        self.assert_snapshot_is_right(data.draw(st.sampled_from(sorted(self.model.snapshots))))

    def assert_snapshot_is_right(self, step):
        reader = StateReader.open(self.path, f"step-{step}")
        for name, column in self.model.snapshots[step].items():
            np.testing.assert_array_equal(reader.column(name), column, err_msg=name)

    @invariant()
    def no_thread_has_failed(self):
        for store in self.store.stores:
            store._check_usable()

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.folder)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "examples", [3, pytest.param(8, marks=pytest.mark.wide), pytest.param(400, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_store_does_what_plain_arrays_do(kind, examples):
    machine = type("StoreAgainstArrays", (StoreAgainstArrays,), {"first_kind": kind})
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    machine.TestCase().runTest()
