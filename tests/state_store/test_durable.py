import re

import icechunk
import numpy as np
import pytest
import zarr

from thermopile.state_store import (
    SnapshotNotFoundError,
    StateReader,
    StoreExistsError,
    StoreMismatchError,
    StoreNotFoundError,
    list_snapshots,
)
from thermopile.state_store.durable import Repository

IDS = np.array([2, 99, 40])


def icechunk_repository(path):
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(path)))


def step_and_snapshot(store, new_rows, step):
    store.put(IDS, new_rows(3, float(step)), step=step)
    return store.snapshot(step, epoch=0).result()


def test_a_column_is_an_uncompressed_zarr_array_in_chunks_of_a_block(create, path):
    create()
    reader = StateReader.open(path)
    for name, dtype, fill_value in [
        ("first/log_s", "float32", -np.inf),
        ("first/tau", "float32", np.float32(0.05)),
        ("visits", "uint32", 0),
        ("last_step", "uint32", 0),
    ]:
        array = reader.array(name)
        assert (array.shape, array.chunks, array.dtype) == ((100,), (16,), dtype)
        assert array.fill_value == fill_value
        assert array.compressors == ()
        assert array.filters == ()


def test_the_root_group_tells_what_the_store_is_made_for(create, path):
    create()
    repository = Repository.open(path)
    assert repository.group(repository.resolve("latest")).attrs.asdict() == {
        "format_version": 1,
        "samples": 100,
        "fields": {"first/log_s": "-inf", "first/tau": 0.05},
        "block_rows": 16,
        "dataset_fingerprint": "glyphs-1",
        "step": 0,
    }


def test_a_commit_carries_step_epoch_config_and_dataset(create, path):
    snapshot = create().snapshot(7, epoch=3, config_hash="c0ffee").result()
    assert icechunk_repository(path).lookup_snapshot(snapshot.id).metadata == {
        "step": 7,
        "epoch": 3,
        "config_hash": "c0ffee",
        "dataset_fingerprint": "glyphs-1",
    }


def test_a_snapshot_says_when_and_at_which_step_it_was_made(create, path):
    store = create()
    snapshot = store.snapshot(7, epoch=3, config_hash="c0ffee").result()
    assert (snapshot.tag, snapshot.step, snapshot.epoch, snapshot.config_hash) == ("step-7", 7, 3, "c0ffee")
    assert snapshot.written_at.utcoffset().total_seconds() == 0
    assert store.last_snapshot == snapshot
    assert [s.tag for s in list_snapshots(path)] == ["step-0", "step-7"]
    assert list_snapshots(path)[-1] == snapshot


def test_a_snapshot_writes_only_the_blocks_changed_since_the_last_one(create, path, new_rows):
    store = create()
    step_and_snapshot(store, new_rows, 1)
    store.put(np.array([2]), new_rows(1, 2.0), step=2)
    store.snapshot(2, epoch=0).result()
    diff = icechunk_repository(path).diff(from_tag="step-1", to_tag="step-2")
    assert diff.updated_chunks == {f"/{name}": [[0]] for name in ("first/log_s", "first/tau", "visits", "last_step")}


def test_resuming_at_an_older_snapshot_undoes_the_later_ones(create, resume, path, new_rows):
    store = create()
    for step in (1, 2, 3):
        step_and_snapshot(store, new_rows, step)
    store.close()
    resumed = resume(at="step-1")
    assert resumed.take(IDS)["first/tau"].tolist() == [1.0, 1.0, 1.0]
    assert [s.tag for s in list_snapshots(path)] == ["step-0", "step-1"]


def test_a_step_made_again_gets_a_new_tag_and_answers_to_the_old_name(create, resume, path, new_rows):
    store = create()
    for attempt in (1, 2, 3):
        store.put(IDS, new_rows(3, float(attempt)), step=5)
        snapshot = store.snapshot(5, epoch=0).result()
        assert snapshot.tag == ("step-5" if attempt == 1 else f"step-5.{attempt}")
        reader = StateReader.open(path, "step-5")
        assert reader.snapshot == snapshot == StateReader.open(path, snapshot.tag).snapshot
        assert reader.column("first/tau")[2] == attempt
        store.close()
        store = resume(at="step-0")


def test_an_untagged_commit_and_a_tag_off_the_branch_do_not_count(create, resume, path, new_rows):
    store = create()
    one = step_and_snapshot(store, new_rows, 1)
    step_and_snapshot(store, new_rows, 2)
    store.close()
    # As a crash leaves it: between a commit and its tag, and between the branch's reset and the tags' deletion.
    icechunk_repository(path).delete_tag("step-2")
    assert list_snapshots(path)[-1] == one
    assert StateReader.open(path).column("first/tau")[2] == 1.0
    icechunk_repository(path).reset_branch("main", list_snapshots(path)[0].id)
    assert [s.tag for s in list_snapshots(path)] == ["step-0"]
    resumed = resume()
    assert resumed.take(IDS)["visits"].tolist() == [0, 0, 0]
    assert icechunk_repository(path).list_tags() == {"step-0"}


def test_an_unknown_snapshot_is_refused_with_the_tags_there_are(create, path, new_rows):
    store = create()
    step_and_snapshot(store, new_rows, 1)
    for at in ("step-2", "1", "", "ZZZZ", "step-01"):
        with pytest.raises(SnapshotNotFoundError, match=re.escape(f"{at!r}; there are: step-0, step-1, latest")):
            StateReader.open(path, at)


def test_a_snapshot_answers_to_its_id(create, path, new_rows):
    store = create()
    one = step_and_snapshot(store, new_rows, 1)
    step_and_snapshot(store, new_rows, 2)
    assert StateReader.open(path, one.id).snapshot == one


def test_a_store_is_not_created_over_anything(create, path):
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("keep me")
    with pytest.raises(StoreExistsError, match="exists already"):
        create()
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]


def test_a_store_is_not_created_over_another(create, path):
    create().close()
    with pytest.raises(StoreExistsError, match="exists already; resume that run"):
        create()


def test_looking_for_a_store_where_there_is_none_creates_nothing(path, resume):
    for look in (StateReader.open, list_snapshots, lambda path: resume(path=path)):
        with pytest.raises(StoreNotFoundError, match="holds no state store"):
            look(path)
    assert not path.parent.exists()


def test_an_interrupted_creation_is_told_from_a_store(path):
    path.mkdir(parents=True)
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))
    with pytest.raises(SnapshotNotFoundError, match="creation was interrupted"):
        StateReader.open(path)


def test_a_store_of_a_later_format_is_refused(create, path):
    create().close()
    repository = icechunk_repository(path)
    session = repository.writable_session("main")
    zarr.open_group(session.store).update_attributes({"format_version": 2})
    repository.create_tag("step-9", session.commit("later", {"step": 9, "epoch": 0, "config_hash": ""}))
    with pytest.raises(StoreNotFoundError, match="format version 2, this thermopile reads 1"):
        StateReader.open(path)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"dataset_fingerprint": "cc3m-7"}, "dataset fingerprint: the store has glyphs-1, this run has cc3m-7"),
        ({"samples": 101}, "number of samples: the store has 100, this run has 101"),
        ({"fields": {"first/log_s": -np.inf}}, "fields: the store has {'first/log_s': -inf, 'first/tau': 0.05}, this"),
        (
            {"fields": {"first/log_s": -np.inf, "first/tau": 0.07}},
            "this run has {'first/log_s': -inf, 'first/tau': 0.07}",
        ),
    ],
)
def test_a_store_made_for_another_run_is_refused_naming_both_sides(create, resume, path, new_rows, changes, difference):
    step_and_snapshot(store := create(), new_rows, 1)
    store.close()
    with pytest.raises(StoreMismatchError, match=re.escape(difference)):
        resume(at="step-0", **changes)
    assert [s.tag for s in list_snapshots(path)] == ["step-0", "step-1"], "a refused resume has undone a snapshot"
    resume().close()


def test_opening_prints_no_warning_of_the_storage(create, resume, capfd):
    create().close()
    resume().close()
    assert capfd.readouterr() == ("", "")
