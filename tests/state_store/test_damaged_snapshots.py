"""A snapshot whose file is damaged stays in the history, is passed over, also by commits, and can be dropped."""

import errno
import os
from itertools import pairwise

import pytest

from thermopile.state_store import history, icechunk_files
from thermopile.state_store.durable import Repository
from thermopile.state_store.errors import SnapshotError, SnapshotNotFoundError
from thermopile.state_store.history import COPY, INDEX
from thermopile.state_store.ranks import Ranks

from support.commits import (
    columns,
    commit,
    files,
    rows,
    tags,
)
from support.damage import cut_short


def damage(path, snapshot, how=cut_short):
    """Damage the file of a snapshot, and return the reopened repository."""
    how(path / "snapshots" / snapshot.id)
    return Repository(path)


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


def test_the_latest_is_the_newest_readable_one_and_the_log_says_what_was_passed(repository, path, caplog):
    made = [commit(repository, step) for step in (1, 2, 3)]
    damage(path, made[0])
    assert damage(path, made[2]).resolve("latest") == made[1]
    (warning,) = caplog.messages
    assert f"snapshot step-3 cannot be read: snapshots/{made[2].id} in" in warning


def test_a_damaged_snapshot_asked_for_is_an_error_with_its_file_and_other_tags(repository, path):
    commit(repository, 1)
    made = commit(repository, 2)
    damaged = damage(path, made)
    for at in ("step-2", made.id):
        with pytest.raises(
            SnapshotNotFoundError, match=f"step-2 cannot be read: .*snapshots/{made.id} .*: step-0, step-1$"
        ):
            damaged.resolve(at)


def test_a_store_whose_every_snapshot_is_damaged_is_no_interrupted_creation(repository, path):
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


# A run goes on


def own_file(repository, kind, snapshot, earlier):
    """A file of this kind that `snapshot` needs and `earlier` does not."""
    first, second = (icechunk_files.needed_files(repository.path, [each.files]) for each in (earlier, snapshot))
    return repository.path / min(name for name in second - first if name.startswith(kind))


@pytest.mark.parametrize(
    ("kind", "how"),
    [("snapshots", cut_short), ("snapshots", os.unlink), ("manifests", cut_short), ("manifests", os.unlink),
     ("chunks", os.unlink)],
)  # fmt: skip
def test_a_commit_builds_on_the_newest_intact_snapshot_and_names_each_damaged_one(repository, path, caplog, kind, how):
    made = [commit(repository, step) for step in (1, 2, 3)]
    for file in [own_file(repository, kind, damaged, earlier) for earlier, damaged in pairwise(made)]:
        how(file)
    bases = []

    def parts(base):
        bases.append(base)
        if len(bases) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield rows(4, 256)

    about = {"step": 4, "epoch": 0, "config_hash": "", "dataset_fingerprint": "glyphs-1"}
    with pytest.raises(SnapshotError, match=r"which builds on step-1, .*No space left"):
        repository.commit(parts, base=made[2], about=about, ranks=Ranks())
    repository.commit(parts, base=made[2], about=about, ranks=Ranks())
    assert bases == [made[0]] * 2
    assert [entry.tag for entry in history.load(path)[0].snapshots] == [f"step-{step}" for step in range(5)]
    assert (columns(repository)["visits"] == [1] * 256 + [4] * 744).all()
    assert sorted(message.partition(" is damaged (")[0].partition("snapshot ")[2] for message in caplog.messages) == [
        "step-2", "step-3"
    ]  # fmt: skip
    assert all("The next one builds on step-1" in message for message in caplog.messages)


def test_retention_leaves_what_a_damaged_snapshot_may_need_until_a_restart(repository, path, tmp_path):
    made = [commit(repository, step, [rows(step, 256 * step)]) for step in (1, 2)]
    manifest = own_file(repository, "manifests", made[1], made[0])
    hidden = manifest.rename(tmp_path / "hidden")
    left = files(path)
    commit(repository, 3, base=made[1])
    repository.retain(2)
    assert tags(repository) == ["step-0", "step-1", "step-3"]
    amounts = []
    for step in range(4, 9):
        commit(repository, step, [rows(step)])
        repository.retain(2)
        amounts.append(len(files(path)))
    assert left <= files(path)
    assert amounts[1:] == amounts[1:2] * 4
    assert tags(repository) == ["step-0", "step-7", "step-8"]
    hidden.rename(manifest)
    assert tags(repository) == ["step-0", "step-2", "step-7", "step-8"]
    assert (columns(repository, "step-2")["visits"] == [0] * 256 + [1] * 256 + [2] * 488).all()
    manifest.unlink()
    restarted = Repository(path)
    restarted.forget_damaged()
    restarted.retain(2)
    assert tags(restarted) == ["step-0", "step-7", "step-8"]
    kept = icechunk_files.needed_files(path, [snapshot.files for snapshot in restarted.snapshots()])
    assert {str(file) for file in files(path)} - kept == {INDEX, COPY, icechunk_files.REFERENCE}


@pytest.mark.parametrize("how", [cut_short, os.unlink])
def test_a_commit_with_no_intact_snapshot_names_the_newest_file_and_the_way_back(repository, path, how):
    made = [repository.resolve("latest"), commit(repository, 1), commit(repository, 2)]
    for snapshot in made:
        how(path / "snapshots" / snapshot.id)
    for _ in range(2):
        with pytest.raises(
            SnapshotError, match=f"step 3, which builds on step-2, was not written: snapshots/{made[2].id} "
        ) as caught:
            commit(repository, 3, base=made[2])
        assert "resume anyway: that drops the damaged snapshots, which `thermopile state check" in str(caught.value)
    assert [snapshot.tag for snapshot in history.load(path)[0].snapshots] == ["step-0", "step-1", "step-2"]
