"""Whatever moment a run is killed at, the state of every announced snapshot is there, to the bit."""

import random

import numpy as np
import pytest

from thermopile.state_store.durable import list_snapshots
from thermopile.state_store.reader import StateReader
from thermopile.state_store.store import StateStore

from support.programs import crashing
from support.programs.crashing import ExpectedState, assert_columns_equal, run_until_killed


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [pytest.param("resident", marks=pytest.mark.wide), "windowed"])
@pytest.mark.parametrize(
    "kills", [1, pytest.param(2, marks=pytest.mark.wide), pytest.param(60, marks=pytest.mark.soak)]
)
def test_a_killed_run_reopens_exactly_at_a_snapshot_no_older_than_the_last_announced(start, path, kind, kills):
    moments, expected, announced = random.Random(7), ExpectedState(), 0

    def written_back():
        return any(path.with_name("state.working").glob("rank-0/c/*/*"))

    for kill in range(kills):
        killed_after = {"snapshots": moments.randrange(8), "seconds": moments.uniform(0, 0.05)}
        if kind == "windowed" and kill == 0:
            killed_after["seen"] = written_back
        announced = max([announced, *run_until_killed(start, path, kind, **killed_after)])
        assert kind == "windowed" or not written_back()
        snapshots = [snapshot for snapshot in list_snapshots(path) if snapshot.step >= expected.step]
        assert snapshots[-1].step >= announced
        for snapshot in snapshots:
            reader = StateReader.open(path, snapshot.id)
            assert_columns_equal(reader.column, expected.after(snapshot.step))
        with StateStore.open(
            path, samples=crashing.SAMPLES, fields=crashing.FIELDS, dataset_fingerprint="crash"
        ) as store:
            rows = store.take(np.arange(crashing.SAMPLES))
        for name, row in rows.items():
            np.testing.assert_array_equal(row.numpy(), expected.columns[name], err_msg=name)
        announced = snapshots[-1].step
    assert announced > 0, "no run lived long enough to write a snapshot: this test has shown nothing"
