"""Checkpoints: whole or absent, and read without executing anything."""

import os
import pickle
import shutil

import pytest
import torch

from thermopile.trainer.checkpoint import (
    CheckpointInfo,
    latest_checkpoint,
    load_checkpoint,
    load_latest,
    remove_checkpoints,
    retained_steps,
    save_checkpoint,
)
from thermopile.trainer.errors import RunError


def info(step):
    return CheckpointInfo(step=step, snapshot=f"id-{step}", order_version=1, dataset_fingerprint="f")


def save(folder, step):
    return save_checkpoint(folder, info(step), {"weights": torch.full((3,), float(step))})


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    path = save(tmp_path, 7)
    loaded, training = load_checkpoint(path)
    assert loaded == info(7)
    assert torch.equal(training["weights"], torch.full((3,), 7.0))


def test_latest_names_the_newest_and_nothing_before_the_first(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 3)
    save(tmp_path, 5)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-5"


def test_without_the_pointer_the_newest_whole_checkpoint_is_the_latest(tmp_path):
    for step in (5, 40, 7):
        save(tmp_path, step)
    (tmp_path / "latest").unlink()
    (tmp_path / ".step-50.partial").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-40"


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 3)
    save_checkpoint(tmp_path, info(3), {"weights": torch.zeros(1)})
    assert torch.equal(load_checkpoint(tmp_path / "step-3")[1]["weights"], torch.zeros(1))


def test_a_save_that_fails_leaves_the_last_checkpoint_and_no_half_of_a_new_one(tmp_path, monkeypatch):
    save(tmp_path, 3)
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 5)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-3"
    assert not (tmp_path / "step-5").exists()


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, 0, {50}), (2, 0, {45, 50}), (1, 20, {0, 20, 40, 50}), (9, 0, {0, 20, 40, 45, 50})],
)
def test_the_newest_steps_and_the_multiples_are_retained(keep_last, keep_every, kept):
    assert retained_steps([50, 0, 20, 45, 40], keep_last, keep_every) == kept


def test_checkpoints_of_other_steps_are_removed_with_what_interruptions_left(tmp_path):
    for step in (3, 5, 40):
        save(tmp_path, step)
    (tmp_path / ".step-2.discarded").mkdir()
    (tmp_path / ".step-7.partial").mkdir()
    remove_checkpoints(tmp_path, keep={5, 40})
    assert {path.name for path in tmp_path.iterdir()} == {"step-5", "step-40", "latest"}


@pytest.mark.parametrize(
    "remove", [lambda folder: remove_checkpoints(folder, keep={5}), lambda folder: save(folder, 3)]
)
def test_a_checkpoint_is_out_of_sight_before_any_of_its_files_goes(tmp_path, monkeypatch, remove):
    for step in (3, 5):
        save(tmp_path, step)
    (tmp_path / "latest").unlink()
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **_: path.name.startswith(".") or pytest.fail(f"{path} in sight")
    )
    remove(tmp_path)
    assert (tmp_path / ".step-3.discarded" / "training.pt").exists()
    assert latest_checkpoint(tmp_path) is not None


def test_a_save_that_finds_no_room_leaves_nothing_behind(tmp_path, monkeypatch):
    save(tmp_path, 3)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, 5)
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "latest"}


@pytest.mark.parametrize("file", ["training.pt", "checkpoint.json"])
@pytest.mark.parametrize("keep", [0, 20])
def test_a_checkpoint_cut_short_is_refused_by_name(tmp_path, file, keep):
    path = save(tmp_path, 3)
    (path / file).write_bytes((path / file).read_bytes()[:keep])
    with pytest.raises(RunError, match="step-3 is damaged"):
        load_checkpoint(path)


def cut_short(path):
    (path / "training.pt").write_bytes((path / "training.pt").read_bytes()[:20])


@pytest.mark.parametrize("damage", [cut_short, shutil.rmtree])
def test_where_the_latest_checkpoint_is_damaged_the_newest_whole_one_before_it_is_taken(tmp_path, caplog, damage):
    for step in (3, 40, 5, 7):  # the run went back behind 40
        save(tmp_path, step)
    cut_short(tmp_path / "step-5")
    damage(tmp_path / "step-7")
    path, loaded, training = load_latest(tmp_path)
    assert (path.name, loaded, training["weights"][0]) == ("step-3", info(3), 3)
    assert "step-7 is damaged" in caplog.text
    assert "Going on from step 3" in caplog.text


def test_a_whole_latest_checkpoint_is_taken_without_a_word(tmp_path, caplog):
    assert load_latest(tmp_path) is None
    save(tmp_path, 3)
    save(tmp_path, 5)
    assert load_latest(tmp_path)[:2] == (tmp_path / "step-5", info(5))
    assert not caplog.text


def test_where_all_checkpoints_are_damaged_the_newest_is_named(tmp_path):
    for step in (3, 5):
        cut_short(save(tmp_path, step))
    with pytest.raises(RunError, match=r"step-5 is damaged .* There is none before it that is whole; start anew"):
        load_latest(tmp_path)


class _Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_checkpoint_that_would_execute_code_is_refused(tmp_path):
    path = save(tmp_path, 3)
    for write in (torch.save, lambda payload, to: to.write_bytes(pickle.dumps(payload, protocol=2))):
        write({"weights": _Payload(tmp_path / "executed")}, path / "training.pt")
        with pytest.raises(RunError, match="damaged"):
            load_checkpoint(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "step-", "step-1/../.."])
def test_a_pointer_that_leads_elsewhere_is_refused(tmp_path, name):
    (tmp_path / "latest").write_text(name)
    with pytest.raises(RunError, match="not step-N"):
        latest_checkpoint(tmp_path)
