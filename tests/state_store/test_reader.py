import subprocess
import sys

import numpy as np
import pytest

from thermopile.state_store.durable import Repository
from thermopile.state_store.errors import DamagedChunkError, FieldError, SnapshotNotFoundError
from thermopile.state_store.reader import StateReader

IDS = np.array([2, 99, 40])


def test_a_reader_tells_what_it_reads(create, path):
    snapshot = create().snapshot(7, epoch=3).result()
    reader = StateReader.open(path)
    assert (reader.samples, reader.block_rows, reader.fields) == (100, 16, ("image/log_s", "image/tau"))
    assert (reader.snapshot, reader.dataset_fingerprint) == (snapshot, "glyphs-1")
    assert reader.columns == ("image/log_s", "image/tau", "visits", "last_step")
    assert reader.initial == {"image/log_s": -np.inf, "image/tau": 0.05}


def test_a_reader_works_beside_the_writer_and_keeps_to_its_snapshot(create, path, new_rows):
    store = create()
    store.put(IDS, new_rows(3, 1.0, spread=True), step=1)
    store.snapshot(1, epoch=0).result()
    reader = StateReader.open(path)
    store.put(IDS, new_rows(3, 7.0), step=2)
    store.snapshot(2, epoch=0).result()
    expected = np.full(100, 0.05, dtype=np.float32)
    expected[IDS] = [1.0, 2.0, 3.0]
    np.testing.assert_array_equal(reader.column("image/tau"), expected)
    np.testing.assert_array_equal(reader.array("image/tau")[32:48], expected[32:48])
    assert reader.column("visits")[[2, 99, 40, 41]].tolist() == [1, 1, 1, 0]
    assert reader.column("last_step")[[2, 99, 40, 41]].tolist() == [1, 1, 1, 0]
    assert StateReader.open(path).column("last_step")[2] == 2


def test_a_sample_never_seen_reads_as_its_initial_values(create, path):
    create()
    reader = StateReader.open(path)
    assert (reader.column("image/log_s") == -np.inf).all()
    assert (reader.column("image/tau") == np.float32(0.05)).all()


def test_an_unknown_column_is_refused_with_those_there_are(create, path):
    create()
    with pytest.raises(
        FieldError, match=r"no column 'tau'; it has \['image/log_s', 'image/tau', 'visits', 'last_step'"
    ):
        StateReader.open(path).array("tau")


def test_rows_are_a_range_of_ids_of_the_columns_asked_for(create, path, new_rows):
    store = create()
    store.put(IDS, new_rows(3, 1.0, spread=True), step=1)
    store.snapshot(1, epoch=0).result()
    reader = StateReader.open(path)
    rows = reader.rows(30, 50, ["image/tau", "visits"])
    assert list(rows) == ["image/tau", "visits"]
    assert (rows["image/tau"].dtype, rows["visits"].dtype) == (np.float32, np.uint32)
    np.testing.assert_array_equal(
        rows["image/tau"], np.where(np.arange(30, 50) == 40, np.float32(3.0), np.float32(0.05))
    )
    np.testing.assert_array_equal(rows["visits"], np.arange(30, 50) == 40)
    everything = reader.rows(0, 100)
    assert list(everything) == list(reader.columns)
    for name, column in everything.items():
        np.testing.assert_array_equal(column, reader.column(name))


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4), (90, 101)])
def test_rows_that_are_not_there_are_refused(create, path, start, stop):
    create()
    with pytest.raises(ValueError, match=f"rows {start} … {stop} of a state of 100 samples"):
        StateReader.open(path).rows(start, stop)


@pytest.mark.parametrize("ids", [[40], [99, 2, 40, 2, 0, 41], []])
def test_rows_at_are_those_of_the_ids_in_their_order(create, path, new_rows, ids):
    store = create()
    store.put(IDS, new_rows(3, 1.0, spread=True), step=1)
    store.snapshot(1, epoch=0).result()
    reader = StateReader.open(path)
    rows = reader.rows_at(np.array(ids, np.int64), ["visits", "image/tau"])
    assert list(rows) == ["visits", "image/tau"]
    for name, values in rows.items():
        assert values.dtype == reader.column(name).dtype
        np.testing.assert_array_equal(values, reader.column(name)[np.array(ids, np.int64)])
    assert list(reader.rows_at(np.array(ids, np.int64))) == list(reader.columns)


@pytest.mark.parametrize("ids", [[3, -1], [100, 3]])
def test_rows_at_ids_that_are_not_there_are_refused(create, path, ids):
    create()
    with pytest.raises(ValueError, match=rf"ids {min(ids)} to {max(ids)} of a state of 100 samples"):
        StateReader.open(path).rows_at(np.array(ids))


def test_a_damaged_chunk_is_an_error_in_rows_and_column_alike(create, path, new_rows):
    store = create(samples=600, block_rows=200)
    store.put(np.arange(600), new_rows(600, 1.0, spread=True), step=1)
    store.snapshot(1, epoch=0).result()
    for file in (path / "chunks").iterdir():
        file.write_bytes(file.read_bytes()[:500])
    reader = StateReader.open(path)
    with pytest.raises(DamagedChunkError, match="array 'image/tau', chunk 0"):
        reader.column("image/tau")
    with pytest.raises(DamagedChunkError, match="array 'image/log_s', chunk 2"):
        reader.rows(450, 451)
    with pytest.raises(DamagedChunkError, match="array 'image/log_s', chunk 1"):
        reader.rows_at(np.array([599, 250]))


def test_a_snapshot_that_the_run_deletes_is_no_damage(create, path, new_rows):
    store = create(samples=600, block_rows=200)
    for step in (1, 2):
        store.put(np.arange(600), new_rows(600, float(step), spread=True), step=step)
        store.snapshot(step, epoch=0).result()
    reader, kept = StateReader.open(path, "step-1"), StateReader.open(path, "step-2")
    Repository(path).retain(keep_last=1)
    with pytest.raises(SnapshotNotFoundError, match="step-1 was deleted while it was read"):
        reader.column("image/tau")
    with pytest.raises(SnapshotNotFoundError, match="step-1 was deleted while it was read"):
        reader.rows_at(np.array([7]))
    np.testing.assert_array_equal(kept.column("image/tau"), np.arange(2, 602))


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("reader", {"torch", "numba"}),
        ("durable", {"torch", "numba"}),
        ("errors", {"torch", "numba", "zarr", "icechunk"}),
    ],
)
def test_reading_loads_no_torch_and_an_error_class_nothing_heavy(module, unwanted):
    program = f"import sys; import thermopile.state_store.{module}; sys.exit(str({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"
