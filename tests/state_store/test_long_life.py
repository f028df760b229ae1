"""A run of weeks: what a state takes does not grow with its age, and nothing that goes wrong loses a snapshot."""

import random
import shutil

import numpy as np
import pytest

from thermopile.state_store.durable import Repository
from thermopile.state_store.errors import DamagedChunkError, SnapshotNotFoundError, StateStoreError
from thermopile.state_store.history import COPY
from thermopile.state_store.reader import StateReader
from thermopile.state_store.store import StateStore

from support.programs import long_life


def run(start, function, *arguments):
    process, connection = start(long_life.measured, function, *arguments)
    try:
        return connection.recv()
    except EOFError:
        process.join()
        pytest.fail(f"it ended with exit code {process.exitcode}; its error is on stderr")


@pytest.mark.parametrize("snapshots", [40, pytest.param(5_000, marks=pytest.mark.soak)])
def test_with_few_descriptors_every_snapshot_succeeds_and_nothing_grows(start, tmp_path, snapshots):
    early, late = run(start, long_life.steady, tmp_path / "state", snapshots)
    print(f"{snapshots} snapshots: {early} -> {late}")
    for what in ("entries", "descriptors", "threads"):
        assert late[what] <= early[what] + 10, what
    assert late["bytes"] <= 1.05 * early["bytes"]


@pytest.mark.wide
@pytest.mark.parametrize("failures", [15, pytest.param(200, marks=pytest.mark.soak)])
def test_snapshots_that_fail_for_want_of_descriptors_lose_nothing(start, tmp_path, failures):
    measured = run(start, long_life.starved, tmp_path / "state", failures)
    print(measured)
    assert measured["entries"] < 60, "what failed was not freed"


# A flipped bit in any file

KINDS = ("index", "copy", "refs", "snapshots", "manifests", "transactions", "chunks")


def files_of(state, kind):
    places = {"index": "thermopile.json", "copy": COPY, "refs": "refs/**/*"}
    return sorted(file for file in state.glob(places.get(kind, f"{kind}/*")) if file.is_file())


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A store of large and of small chunks, with three snapshots; and the rows of each."""
    path = tmp_path_factory.mktemp("sound") / "state"
    settings = {"block_rows": 256, "dataset_fingerprint": "glyphs-1"}
    with StateStore.create(path, 600, {"image/tau": 0.05}, **settings) as store:
        for step in (1, 2):
            ids = np.arange(0, 600, step)
            store.put(ids, {"image/tau": np_tensor(np.linspace(step, step + 1, len(ids)))}, step=step)
            store.snapshot(step, epoch=0).result()
    return path, {tag: rows_of(path, tag) for tag in ("step-0", "step-1", "step-2")}


def np_tensor(values):
    import torch

    return torch.from_numpy(values.astype(np.float32))


def rows_of(path, tag):
    reader = StateReader.open(path, tag)
    return {name: reader.column(name).tobytes() for name in reader.columns}


@pytest.mark.parametrize("flips", [6, pytest.param(120, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_an_error_that_names_the_file_or_changes_nothing(sound, tmp_path, kind, flips, caplog):
    path, rows = sound
    chance = random.Random(kind)
    told = 0
    for number in range(flips):
        state = tmp_path / str(number) / "state"
        shutil.copytree(path, state)
        file = chance.choice(files_of(state, kind))
        data = bytearray(file.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        name = str(file.relative_to(state))
        for tag, right in rows.items():
            told += reads_right_or_names(state, tag, right, name)
        checked = Repository(state)
        told += bool(checked.damage() or checked.unreadable() or name in caplog.text)
        goes_on(state, rows, name)
        caplog.clear()
        shutil.rmtree(state.parent)
    if kind != "transactions":  # which nobody reads
        assert told, "no flip was noticed"


def reads_right_or_names(state, tag, right, name):
    """Return whether an error named the file; else the rows must be right."""
    try:
        assert rows_of(state, tag) == right, f"{tag}: other rows after a flip in {name}"
    except StateStoreError as error:
        assert_names(error, name)
        return True
    return False


def assert_names(error, name):
    assert name in str(error), f"{error} does not name {name}"


def goes_on(state, rows, name):
    """Resume as a run does: at the newest snapshot, or at an earlier one where that is damaged."""
    settings = {"samples": 600, "fields": {"image/tau": 0.05}, "dataset_fingerprint": "glyphs-1"}
    for tag in reversed(rows):
        try:
            store = StateStore.open(state, at=tag, **settings)
        except (DamagedChunkError, SnapshotNotFoundError) as error:
            assert_names(error, name)
            continue
        with store:
            taken = store.take(np.arange(600))["image/tau"].numpy()
        assert taken.tobytes() == rows[tag]["image/tau"]
        return
    raise AssertionError("no snapshot could be resumed")
