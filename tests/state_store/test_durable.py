import errno
import os
import re
import subprocess

import icechunk
import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec

from thermopile.state_store import (
    SnapshotError,
    SnapshotNotFoundError,
    StateReader,
    StoreExistsError,
    StoreMismatchError,
    StoreNotFoundError,
    list_snapshots,
)
from thermopile.state_store import history as history_module
from thermopile.state_store.commit import ColumnPart, array_of
from thermopile.state_store.durable import Repository
from thermopile.state_store.history import COPY, INDEX
from thermopile.state_store.ranks import Alone
from thermopile.state_store.schema import Description, Schema

SCHEMA = Schema({"image/log_s": -np.inf, "image/tau": 0.05})
# A chunk of 1 KB: icechunk keeps those of up to 512 B in its manifests.
SAMPLES, BLOCK_ROWS = 1_000, 256
CHANGED_BYTES = SAMPLES * 4 * 4


def rows(value, start=0, stop=SAMPLES):
    """Every column of the rows start … stop − 1, all of one value."""
    return ColumnPart(start, {name: np.full(stop - start, value, SCHEMA.dtype(name)) for name in SCHEMA.columns})


def commit(repository, step, parts=None, **changes):
    """Commit a snapshot on top of the last one; by default all rows are set to the number of the step."""
    settings = {"base": repository.resolve("latest"), "epoch": 0, "config_hash": "", "dataset_fingerprint": "glyphs-1"}
    parts = [rows(step)] if parts is None else parts
    return repository.commit(parts, step=step, ranks=Alone(), **(settings | changes))


def columns(repository, at="latest"):
    group = repository.group(repository.resolve(at))
    return {name: array_of(group, name)[:] for name in SCHEMA.columns}


def assert_all_rows(repository, at, value):
    for name, column in columns(repository, at).items():
        np.testing.assert_array_equal(column, np.full(SAMPLES, value, column.dtype), err_msg=f"{name} at {at}")


def tags(repository):
    return [snapshot.tag for snapshot in repository.snapshots()]


def disk_use(path):
    return sum(entry.lstat().st_blocks * 512 for entry in path.rglob("*"))


def files(path):
    return {entry.relative_to(path) for entry in path.rglob("*") if entry.is_file()}


def icechunk_repository(path):
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(path)))


@pytest.fixture
def repository(path):
    return Repository.create(path, Description(SAMPLES, SCHEMA, BLOCK_ROWS, "glyphs-1"))


# What a repository holds


def test_a_column_is_an_uncompressed_zarr_array_with_a_checksum_in_chunks_of_a_block(repository, path):
    reader = StateReader.open(path)
    for name, dtype, fill_value in [
        ("image/log_s", "float32", -np.inf),
        ("image/tau", "float32", np.float32(0.05)),
        ("visits", "uint32", 0),
        ("last_step", "uint32", 0),
    ]:
        array = reader.array(name)
        assert (array.shape, array.chunks, array.dtype) == ((SAMPLES,), (BLOCK_ROWS,), dtype)
        assert array.fill_value == fill_value
        assert array.compressors == (Crc32cCodec(),)
        assert array.filters == ()


def test_a_damaged_chunk_is_an_error_and_never_a_value(repository, path):
    before = files(path)
    commit(repository, 1)
    chunk = next(path / name for name in files(path) - before if name.parts[0] == "chunks")
    damaged = bytearray(chunk.read_bytes())
    damaged[100] ^= 1
    chunk.write_bytes(damaged)
    with pytest.raises(ValueError, match="checksum"):
        columns(Repository.open(path))
    np.testing.assert_array_equal(columns(Repository.open(path), "step-0")["visits"], np.zeros(SAMPLES))


def test_a_snapshot_says_what_it_is_of_and_how_much_was_written_for_it(repository, path):
    made = commit(repository, 7, epoch=3, config_hash="c0ffee")
    assert (made.tag, made.step, made.epoch, made.config_hash) == ("step-7", 7, 3, "c0ffee")
    assert (made.dataset_fingerprint, made.bytes_written) == ("glyphs-1", CHANGED_BYTES)
    assert made.written_at.utcoffset().total_seconds() == 0
    assert list_snapshots(path) == [repository.resolve("step-0"), made]


# Committing


def test_a_commit_replaces_the_rows_of_its_parts_and_keeps_the_others_of_its_base(repository):
    commit(repository, 1)
    commit(repository, 2, [rows(20, 256, 512), rows(21, 768, 1_000)])
    for column in columns(repository).values():
        expected = np.repeat([1, 20, 1, 21], [256, 256, 256, 232]).astype(column.dtype)
        np.testing.assert_array_equal(column, expected)
    assert_all_rows(repository, "step-1", 1)


def test_only_the_blocks_of_the_parts_are_written(repository, path):
    commit(repository, 1)
    before = files(path)
    made = commit(repository, 2, [rows(2, 256, 512)])
    assert made.bytes_written == 4 * 1_024
    assert sum(name.parts[0] == "chunks" for name in files(path) - before) == 4, "one chunk a column"


def test_parts_are_written_as_they_are_made_so_that_they_may_share_one_buffer(repository):
    def parts():
        buffer = rows(0, 0, 256)
        for start in range(0, SAMPLES, BLOCK_ROWS):
            for column in buffer.columns.values():
                column[:] = start
            yield ColumnPart(start, {name: column[: SAMPLES - start] for name, column in buffer.columns.items()})

    commit(repository, 1, parts())
    expected = np.arange(SAMPLES) // BLOCK_ROWS * BLOCK_ROWS
    for name, column in columns(repository).items():
        np.testing.assert_array_equal(column, expected, err_msg=name)


def test_a_snapshot_of_no_change_is_a_snapshot(repository):
    commit(repository, 1)
    assert commit(repository, 2, []).bytes_written == 0
    assert_all_rows(repository, "step-2", 1)


def test_a_commit_builds_on_the_snapshot_it_is_told_to(repository):
    commit(repository, 1)
    commit(repository, 2, [rows(2, 0, 256)], base=repository.resolve("step-0"))
    assert columns(repository)["visits"].tolist() == [2] * 256 + [0] * 744


# The history


def test_the_tags_in_the_order_of_their_steps_are_the_history(repository, path):
    for step in (9, 10, 100):
        commit(repository, step)
    icechunk_repository(path).create_tag("favourite", repository.resolve("step-9").id)
    assert tags(repository) == tags(Repository.open(path)) == ["step-0", "step-9", "step-10", "step-100"]


def test_undoing_makes_a_snapshot_the_last_one(repository, path):
    for step in (1, 2, 3):
        commit(repository, step)
    repository.undo_after(repository.resolve("step-1"))
    assert tags(repository) == tags(Repository.open(path)) == ["step-0", "step-1"]
    assert_all_rows(repository, "latest", 1)


def test_a_step_made_again_has_its_old_name(repository, path):
    for attempt in (1, 2, 3):
        made = commit(repository, 5, [rows(attempt)])
        assert made.tag == "step-5"
        assert repository.snapshots() == [repository.resolve("step-0"), made]
        assert_all_rows(Repository.open(path), "step-5", attempt)
        repository.undo_after(repository.resolve("step-0"))


def test_a_snapshot_answers_to_its_id(repository):
    made = commit(repository, 1)
    commit(repository, 2)
    assert repository.resolve(made.id) == made


def test_an_unknown_snapshot_is_refused_with_the_tags_there_are(repository, path):
    commit(repository, 1)
    for at in ("step-2", "1", "", "ZZZZ", "step-01"):
        with pytest.raises(SnapshotNotFoundError, match=re.escape(f"{at!r}; available: step-0, step-1, latest")):
            StateReader.open(path, at)


# Keeping some, and freeing the rest


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, 0, [0, 50]),
        (3, 0, [0, 30, 40, 50]),
        (6, 0, [0, 10, 20, 30, 40, 50]),
        (99, 0, [0, 10, 20, 30, 40, 50]),
        (1, 20, [0, 20, 40, 50]),
        (2, 7, [0, 40, 50]),
    ],
)
def test_retaining_keeps_the_last_ones_those_of_round_steps_and_the_first(repository, keep_last, keep_every, kept):
    for step in (10, 20, 30, 40, 50):
        commit(repository, step)
    repository.retain(keep_last, keep_every)
    assert tags(repository) == [f"step-{step}" for step in kept]
    for step in kept[1:]:
        assert_all_rows(repository, f"step-{step}", step)


@pytest.mark.parametrize("snapshots", [10, pytest.param(50, marks=pytest.mark.soak)])
def test_the_disk_holds_what_is_kept_and_little_more(path, snapshots):
    samples, block = 500_000, 65_536
    repository = Repository.create(path, Description(samples, SCHEMA, block, "glyphs-1"))
    empty, most = disk_use(path), 0
    for step in range(1, snapshots + 1):
        commit(repository, step, [rows(step, 0, samples)])
        most = max(most, disk_use(path))
        repository.retain(3)
        if step == 1:
            of_one = most - empty
    assert most < 5 * of_one
    assert len(tags(repository)) == 4
    assert disk_use(path) < 4 * of_one


def test_a_reader_of_a_kept_snapshot_goes_on_while_others_are_collected(repository, path):
    commit(repository, 1)
    commit(repository, 2)
    array = StateReader.open(path, "step-2").array("visits")
    assert (array[:500] == 2).all()
    for step in (3, 4, 5):
        commit(repository, step)
        repository.retain(1, keep_every=2)
    assert tags(repository) == ["step-0", "step-2", "step-4", "step-5"]
    assert (array[:] == 2).all()


def test_retaining_frees_what_undoing_crashes_and_kills_have_left(repository, path):
    commit(repository, 1)
    repository.retain(1)
    alone = files(path)
    commit(repository, 2)
    repository.undo_after(repository.resolve("step-1"))
    session = icechunk_repository(path).writable_session("main")
    zarr.open_group(session.store, mode="r+")["visits"][:] = 9
    session.commit("killed before it was announced")
    places = (
        "chunks/KILLED#1",
        "snapshots/KILLED#12",
        ".thermopile.json.7.partial",
        "refs/branch.main/.ref.json.7.partial",
    )
    for place in places:
        (path / place).write_bytes(b"half")
    repository.retain(1)
    assert files(path) == alone
    assert_all_rows(repository, "latest", 1)


def test_files_and_directories_do_not_grow_with_the_snapshots_made(repository, path):
    def entries(steps):
        for step in steps:
            commit(repository, step)
            repository.retain(2)
        return len(list(path.rglob("*"))), {entry for entry in path.rglob("*") if entry.is_dir()}

    assert entries(range(1, 4)) == entries(range(4, 20))


@pytest.mark.parametrize("file", ["snapshots", "manifests", "chunks"])
def test_nothing_is_deleted_while_a_file_of_what_is_to_be_kept_is_missing(repository, path, file):
    made = [commit(repository, step) for step in (1, 2, 3)]
    newest_alone = {name for name in files(path) if name.parts[0] == file}
    repository.retain(1)
    hidden = path / next(name for name in newest_alone & files(path) if file != "snapshots" or name.name == made[2].id)
    hidden.rename(path.parent / "hidden")
    commit_of_another_base = files(path)
    for _ in range(2):
        with pytest.raises(
            SnapshotError, match=f"not all old snapshots were deleted.*{file}/{hidden.name} .*it is missing"
        ):
            repository.retain(1)
        assert files(path) == commit_of_another_base
    (path.parent / "hidden").rename(hidden)
    repository.retain(1)
    assert_all_rows(repository, "latest", 3)


@pytest.mark.parametrize("directory", ["snapshots", "manifests", "chunks", "transactions"])
def test_nothing_is_deleted_where_a_directory_cannot_be_listed(repository, path, directory, monkeypatch):
    for step in (1, 2):
        commit(repository, step)
    scandir = os.scandir

    def refuse(place):
        if place == path / directory:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return scandir(place)

    before = files(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(SnapshotError, match="Too many open files"):
            repository.retain(1)
    assert files(path) == before
    repository.retain(1)
    assert tags(repository) == ["step-0", "step-2"]


# Failures


def test_a_commit_that_fails_leaves_the_last_snapshot_and_no_file(repository, path):
    def parts():
        yield rows(2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    commit(repository, 1)
    repository.retain(1)
    before = files(path)
    with pytest.raises(SnapshotError, match=r"step 2, .*, was not written: .*No space left on device") as caught:
        commit(repository, 2, parts())
    assert isinstance(caught.value.__cause__, OSError)
    assert files(path) == before
    assert tags(repository) == ["step-0", "step-1"]
    assert_all_rows(repository, "latest", 1)
    assert commit(repository, 2).tag == "step-2"
    assert_all_rows(repository, "latest", 2)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root can mount a small file system to fill")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_is_said_and_the_next_snapshot_goes_on_when_there_is_room(small_disk):
    samples = 100_000
    repository = Repository.create(small_disk / "state", Description(samples, SCHEMA, 4_096, "glyphs-1"))
    commit(repository, 1, [rows(1, 0, 40_000)])
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(500_000))
    before = disk_use(small_disk)
    for _ in range(2):
        with pytest.raises(SnapshotError, match=r"step 2, .*, was not written: .*No space left on device"):
            commit(repository, 2, [rows(2, 0, samples)])
        # zarr lets up to ten chunks that it has begun come to their end.
        assert disk_use(small_disk) <= before + 10 * 5 * 4_096
        while disk_use(small_disk) > before:
            repository.retain(1)
        assert (columns(repository)["visits"] == [1] * 40_000 + [0] * 60_000).all()
    ballast.unlink()
    commit(repository, 2, [rows(2, 0, 40_000)])
    assert tags(repository) == ["step-0", "step-1", "step-2"]
    assert (columns(repository)["visits"] == [2] * 40_000 + [0] * 60_000).all()


def test_a_store_that_the_disk_does_not_take_is_not_made(small_disk):
    with (small_disk / "ballast").open("wb", buffering=0) as ballast:
        ballast.write(bytes(3_000_000))  # writes what there is room for
    with pytest.raises(SnapshotError, match="could not be created: No space left on device"):
        Repository.create(small_disk / "state", Description(SAMPLES, SCHEMA, BLOCK_ROWS, "glyphs-1"))
    assert not (small_disk / "state").exists()


@pytest.mark.parametrize("written", [True, False], ids=["flushed or not", "not written"])
@pytest.mark.parametrize("file", [COPY, INDEX])
def test_a_snapshot_whose_index_does_not_reach_the_disk_is_none(repository, path, monkeypatch, file, written):
    write = history_module.write_atomically

    def fail(to, data):
        if to.name != file or (written and data != before):
            write(to, data)
        if to.name == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    commit(repository, 1)
    before = (path / INDEX).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(history_module, "write_atomically", fail)
        with pytest.raises(SnapshotError, match="Input/output error"):
            commit(repository, 2)
    base = repository.resolve("step-1")
    commit(repository, 2, [rows(20)], base=base)
    assert tags(Repository.open(path)) == ["step-0", "step-1", "step-2"]
    assert_all_rows(Repository.open(path), "step-2", 20)
    repository.retain(3)
    assert_all_rows(Repository.open(path), "step-2", 20)


def test_a_snapshot_that_failed_after_it_took_its_place_is_gone_with_the_next_and_takes_no_kept_one_away(
    repository, path, monkeypatch
):
    write = history_module.write_atomically

    def write_and_fail(to, data):
        if not (to.name == INDEX and (path / INDEX).read_bytes() != before):  # nor is it put back
            write(to, data)
        if to.name == INDEX:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    base = commit(repository, 1)
    before = (path / INDEX).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(history_module, "write_atomically", write_and_fail)
        with pytest.raises(SnapshotError, match="Input/output error"):
            commit(repository, 2)
    assert tags(repository) == ["step-0", "step-1", "step-2"]
    commit(repository, 3, base=base)
    repository.retain(2)
    assert tags(repository) == ["step-0", "step-1", "step-3"]
    assert_all_rows(repository, "step-1", 1)


def test_a_snapshot_whose_description_is_damaged_is_left_out_and_harms_no_other(repository, path):
    damaged = commit(repository, 1)
    commit(repository, 2)
    file = path / "snapshots" / damaged.id
    file.write_bytes(file.read_bytes()[:20])
    reopened = Repository.open(path)
    commit(reopened, 3)
    assert tags(reopened) == ["step-0", "step-2", "step-3"]
    assert_all_rows(reopened, "step-2", 2)
    assert_all_rows(reopened, "step-3", 3)


# Making, opening, matching


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


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"dataset_fingerprint": "cc3m-7"}, "dataset fingerprint: the store has glyphs-1, this run has cc3m-7"),
        ({"samples": 101}, "number of samples: the store has 100, this run has 101"),
        ({"fields": {"image/log_s": -np.inf}}, "fields: the store has {'image/log_s': -inf, 'image/tau': 0.05}, this"),
        (
            {"fields": {"image/log_s": -np.inf, "image/tau": 0.07}},
            "this run has {'image/log_s': -inf, 'image/tau': 0.07}",
        ),
    ],
)
def test_a_store_made_for_another_run_is_refused_naming_both_sides(create, resume, path, new_rows, changes, difference):
    with create() as store:
        store.put(np.array([2, 99, 40]), new_rows(3), step=1)
        store.snapshot(1, epoch=0).result()
    with pytest.raises(StoreMismatchError, match=re.escape(difference)):
        resume(at="step-0", **changes)
    assert [s.tag for s in list_snapshots(path)] == ["step-0", "step-1"], "a refused resume has undone a snapshot"
    resume().close()


def test_opening_prints_no_warning_of_the_storage(repository, path, capfd):
    commit(Repository.open(path), 1)
    assert capfd.readouterr() == ("", "")


# A snapshot whose file is damaged


def cut_short(file):
    file.write_bytes(file.read_bytes()[:20])


def damage(path, snapshot, how=cut_short):
    """Damage the file of a snapshot, and return the repository opened anew."""
    how(path / "snapshots" / snapshot.id)
    return Repository.open(path)


def unreadable_tags(repository):
    return [snapshot.tag for snapshot in repository.unreadable()]


@pytest.mark.parametrize(("how", "reason"), [(cut_short, "its sha256 does not match"), (os.unlink, "it is missing")])
def test_a_damaged_snapshot_stays_in_the_history_with_its_file_and_what_is_wrong(repository, path, how, reason):
    made = [commit(repository, step) for step in (1, 2, 3)]
    damaged = damage(path, made[1], how)
    assert [entry.tag for entry in damaged.history()] == ["step-0", "step-1", "step-2", "step-3"]
    assert tags(damaged) == ["step-0", "step-1", "step-3"]
    (found,) = damaged.unreadable()
    assert (found.tag, found.id, found.file) == ("step-2", made[1].id, f"snapshots/{made[1].id}")
    assert found.reason.startswith(reason)
    assert (path / found.file).parent.is_dir()


def test_the_latest_is_the_newest_that_can_be_read_and_the_log_says_what_was_passed_over(repository, path, caplog):
    made = [commit(repository, step) for step in (1, 2, 3)]
    damage(path, made[0])
    assert damage(path, made[2]).resolve("latest") == made[1]
    (warning,) = caplog.messages
    assert f"snapshot step-3 cannot be read: snapshots/{made[2].id} in" in warning


def test_a_damaged_snapshot_asked_for_is_an_error_with_its_file_and_the_tags_that_can_be_read(repository, path):
    commit(repository, 1)
    made = commit(repository, 2)
    damaged = damage(path, made)
    for at in ("step-2", made.id):
        with pytest.raises(
            SnapshotNotFoundError, match=f"step-2 cannot be read: .*snapshots/{made.id} .*: step-0, step-1$"
        ):
            damaged.resolve(at)


def test_a_store_whose_every_snapshot_is_damaged_is_not_taken_for_an_interrupted_creation(repository, path):
    damaged = damage(path, repository.resolve("step-0"))
    with pytest.raises(
        SnapshotNotFoundError, match=r"snapshot step-0 cannot be read.*; readable snapshots: none"
    ) as caught:
        damaged.resolve("latest")
    assert "Delete" not in str(caught.value)


def test_undoing_what_came_after_a_snapshot_undoes_the_damaged_ones_too(repository, path):
    made = [commit(repository, step) for step in (1, 2, 3)]
    damage(path, made[0])
    damaged = damage(path, made[2])
    damaged.undo_after(damaged.resolve("latest"))
    assert unreadable_tags(damaged) == ["step-1"]
    assert tags(damaged) == ["step-0", "step-2"]


@pytest.mark.parametrize("how", [cut_short, os.unlink])
def test_a_commit_on_a_snapshot_damaged_meanwhile_names_its_file_and_the_way_back(repository, path, how):
    commit(repository, 1)
    base = commit(repository, 2)
    how(path / "snapshots" / base.id)
    for _ in range(2):
        with pytest.raises(
            SnapshotError, match=f"step 3, which builds on step-2, was not written: snapshots/{base.id} "
        ) as caught:
            commit(repository, 3, base=base)
        assert "resume anyway: that drops the damaged snapshots, which `thermopile state check" in str(caught.value)
    reopened = Repository.open(path)
    reopened.undo_after(reopened.resolve("step-1"))
    commit(reopened, 2, [rows(20, 256)])
    assert tags(reopened) == ["step-0", "step-1", "step-2"]
    assert (columns(reopened)["visits"] == [1] * 256 + [20] * 744).all()
