"""A snapshot whose file is damaged stays in the history, is passed over, and can be dropped."""

import os

import pytest
from commits import (
    columns,
    commit,
    rows,
    tags,
)

from thermopile.state_store import (
    SnapshotError,
    SnapshotNotFoundError,
)
from thermopile.state_store.durable import Repository


def cut_short(file):
    file.write_bytes(file.read_bytes()[:20])


def damage(path, snapshot, how=cut_short):
    """Damage the file of a snapshot, and return the reopened repository."""
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
