"""Old snapshots are deleted, and only what no kept one needs."""

import errno
import os

import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from thermopile.state_store.durable import Repository
from thermopile.state_store.errors import SnapshotError
from thermopile.state_store.history import early_steps, retained_steps
from thermopile.state_store.reader import StateReader
from thermopile.state_store.schema import Description

from support.commits import (
    SCHEMA,
    assert_all_rows,
    commit,
    disk_use,
    files,
    icechunk_repository,
    rows,
    tags,
)


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


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, 0, {50}), (2, 0, {45, 50}), (1, 20, {0, 20, 40, 50}), (9, 0, {0, 20, 40, 45, 50})],
)
def test_the_newest_steps_and_the_multiples_are_retained(keep_last, keep_every, kept):
    assert retained_steps([50, 0, 20, 45, 40], keep_last, keep_every) == kept


@given(st.sets(st.integers(0, 10**6), max_size=60), st.integers(0, 9))
def test_early_snapshots_that_are_kept_stay_whatever_comes_later_and_are_few(steps, keep_early):
    kept, ascending = set(), sorted(steps)
    for count in range(len(ascending)):  # as a run does, which has only what it kept and the next one
        now = early_steps(kept | {ascending[count]}, keep_early)
        assert kept <= now
        kept = now
    assert kept == early_steps(steps, keep_early)
    assert len(kept) <= keep_early * 6 + 1
    for step in steps - {0}:  # no sample has long to wait for the next one
        assert not keep_early or any(earlier <= step <= earlier * 10 ** (1 / keep_early) for earlier in kept)


def test_early_snapshots_of_a_run_grow_like_a_logarithm():
    counts = [len(early_steps(range(1, steps), 3)) for steps in (10, 100, 1000, 10_000)]
    assert counts == [3, 6, 9, 12]
    assert sorted(early_steps(range(0, 1001, 50), 3)) == [50, 100, 250, 500, 1000]


def test_a_store_keeps_early_snapshots_whether_it_retains_after_each_or_at_the_end(repository, path):
    kept = [0, 5, 10, 25, 50, 75, 80]
    for step in range(5, 81, 5):
        commit(repository, step)
        repository.retain(2, keep_early=3)
    assert tags(repository) == [f"step-{step}" for step in kept]
    for step in kept[1:]:
        assert_all_rows(repository, f"step-{step}", step)


@pytest.mark.parametrize(
    "snapshots", [pytest.param(10, marks=pytest.mark.wide), pytest.param(50, marks=pytest.mark.soak)]
)
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
