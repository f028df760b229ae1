"""A snapshot that is damaged while the run goes on costs nothing that is held anywhere else."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from thermopile.state_store import history
from thermopile.state_store.durable import list_snapshots
from thermopile.state_store.errors import BackgroundError, SnapshotError
from thermopile.state_store.icechunk_files import needed_files
from thermopile.state_store.ranks import Ranks
from thermopile.state_store.reader import StateReader
from thermopile.state_store.store import StateStore
from thermopile.storage.bucket import SCRATCH, Address

from support.threads import ThreadRank

SAMPLES, BLOCK_ROWS, SPLIT = 2_400, 200, 1_200
"""Chunks of 800 bytes: icechunk keeps those of up to 512 in its manifests."""
FIELDS = {"image/tau": 0.05, "image/u": 0.0}
BUDGET = 2 * BLOCK_ROWS * 32
"""Two of a rank's blocks."""
KINDS = {"resident": (1, None), "windowed": (1, BUDGET), "two ranks": (2, None), "two ranks, windowed": (2, BUDGET)}


def opened(kind, path):
    """Create the store at `path`, or open it; return one store a rank."""
    world, budget = KINDS[kind]
    settings = {"samples": SAMPLES, "fields": FIELDS, "dataset_fingerprint": "glyphs-1", "memory_budget": budget}
    ranks = ThreadRank.both() if world == 2 else [Ranks()]
    owned = [range(SPLIT), range(SPLIT, SAMPLES)] if world == 2 else [range(SAMPLES)]
    there = path.holds(history.INDEX)

    def open_one(rank, ids):
        of_rank = settings | {"ranks": rank, "owned": ids}
        return StateStore.open(path, **of_rank) if there else StateStore.create(path, block_rows=BLOCK_ROWS, **of_rank)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(open_one, ranks, owned))


def step_of(stores, step, blocks):
    """Change the rows of some blocks of each half, in a way that hands any mistake on."""
    for first in [half + block * BLOCK_ROWS for half in (0, SPLIT) for block in blocks]:
        ids, [store] = np.arange(first, first + BLOCK_ROWS), [store for store in stores if first in store.owned]
        state = store.take(ids)
        store.put(ids, {name: 0.5 * state[name] + step + i for i, name in enumerate(FIELDS)}, step=step)


def snapshot(stores, step):
    """Ask for a snapshot, and change rows right after the cut: these changes are not in it."""
    futures = [store.snapshot(step, epoch=0) for store in stores]
    step_of(stores, step + 1, [0, 4])
    return next(future.result() for future in futures)


def train(stores, harm=lambda made: None):
    """Make four snapshots, each of other blocks, and do harm to the third before the fourth."""
    for step, blocks in ((1, [0, 1, 2]), (3, [2, 3]), (5, [1]), (7, [3, 5])):
        step_of(stores, step, blocks)
        made = snapshot(stores, step)
        if step == 5:
            harm(made)
    retained = [store.retain(1) for store in stores]
    return [future.result() for future in retained]


def damage(path, made, what, how):
    """Damage a file that no snapshot before `made` needs."""
    earlier = [each.files for each in list_snapshots(path) if each.step < made.step]
    own = sorted(needed_files(path, [made.files]) - needed_files(path, earlier))
    name = next(name for name in own if name.startswith(what))
    how(path / name)
    return name


def gone(place):
    place.parent.remove([place.name])


def flipped(place):
    data = bytearray(place.read_bytes(1 << 20))
    data[len(data) // 2] ^= 1
    place.rewrite(bytes(data))


def close(stores):
    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(StateStore.close, stores))


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    """The state of a run without damage."""
    path = tmp_path_factory.mktemp("undamaged") / "state"
    stores = opened("resident", path)
    train(stores)
    close(stores)
    return path


def assert_costs_nothing(path, undamaged, kind, what, how, caplog):
    stores, named = opened(kind, path), []
    train(stores, lambda made: named.append(damage(path, made, what, how)))
    close(stores)
    ours, expected = StateReader.open(path), StateReader.open(undamaged)
    assert ours.snapshot.tag == expected.snapshot.tag == "step-7"
    for name in ours.columns:
        np.testing.assert_array_equal(ours.column(name), expected.column(name), err_msg=name)
    [warning] = caplog.messages
    assert f"snapshot step-5 is damaged ({named[0]} in the state directory" in warning
    assert [each.tag for each in history.load(path)[0].snapshots] == ["step-0", "step-5", "step-7"]


@pytest.mark.parametrize(
    ("what", "how"),
    [("snapshots", gone), ("manifests", flipped), ("chunks", gone),
     pytest.param("snapshots", flipped, marks=pytest.mark.wide),
     pytest.param("manifests", gone, marks=pytest.mark.wide)],
)  # fmt: skip
@pytest.mark.parametrize(
    "kind",
    [
        "resident",
        "two ranks, windowed",
        *(pytest.param(each, marks=pytest.mark.wide) for each in ("windowed", "two ranks")),
    ],
)
def test_the_next_snapshot_holds_every_row_of_a_run_without_the_damage(path, undamaged, kind, what, how, caplog):
    assert_costs_nothing(path, undamaged, kind, what, how, caplog)


@pytest.mark.wide
@pytest.mark.parametrize(("what", "how"), [("snapshots", flipped), ("manifests", gone), ("chunks", gone)])
@pytest.mark.parametrize("kind", ["resident", "two ranks, windowed"])
def test_the_same_in_a_bucket(s3, undamaged, kind, what, how, caplog, tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    path = Address("bucket", f"damaged-{kind}-{what}".replace(", ", "-").replace(" ", "-")) / "state"
    assert_costs_nothing(path, undamaged, kind, what, how, caplog)


def resumed(kind, path, what):
    """Open a trained state, and damage the snapshot that it was opened at."""
    stores = opened(kind, path)
    train(stores)
    close(stores)
    stores = opened(kind, path)
    return stores, damage(path, stores[0].last_snapshot, what, gone)


@pytest.mark.parametrize("kind", ["resident", "two ranks"])
def test_where_the_resumed_snapshot_is_damaged_the_next_is_written_from_memory(path, kind):
    stores, _ = resumed(kind, path, "manifests")
    step_of(stores, 9, [0])
    assert next(future.result() for future in [store.snapshot(9, epoch=0) for store in stores]).tag == "step-9"
    reader = StateReader.open(path, "step-9")
    for store in stores:
        for name, held in store.take(np.arange(store.owned.start, store.owned.stop)).items():
            np.testing.assert_array_equal(reader.column(name)[store.owned.start : store.owned.stop], held.numpy())
    close(stores)


@pytest.mark.parametrize(
    ("kind", "what"), [("windowed", "manifests"), ("windowed", "chunks"), ("two ranks, windowed", "manifests")]
)
def test_rows_that_only_a_damaged_snapshot_holds_end_the_run_naming_its_file(path, kind, what):
    stores, file = resumed(kind, path, what)
    futures = [store.snapshot(9, epoch=0) for store in stores]
    for store, future in zip(stores, futures, strict=True):
        with pytest.raises(SnapshotError, match=f"the snapshot of step 9, .* was not written: .*{file} "):
            future.result()
        with pytest.raises(BackgroundError, match=f"rows that it needs are lost: .*{file} .*Resume the run"):
            store.take(np.array([store.owned.start]))
    close(stores)
    assert [each.tag for each in history.load(path)[0].snapshots] == ["step-0", "step-7"]
