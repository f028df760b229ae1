"""Checkpoints: whole or absent, verified before anything in them is believed, and read without executing anything."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from thermopile.storage.sealed_json import seal_document, unseal
from thermopile.trainer.checkpoints.checkpoint_files import (
    CheckpointInfo,
    latest_checkpoint,
    load_checkpoint,
    load_latest,
    remove_checkpoints,
    save_checkpoint,
)
from thermopile.trainer.errors import DamagedCheckpointError, RunError

FILES = ("checkpoint.json", "tensors.safetensors", "training.json")


def info(step):
    identity = {"order_version": 1, "dataset_fingerprint": "f", "settings": {"optimizer": {"lr": 0.1}}}
    return CheckpointInfo(step=step, snapshot=f"id-{step}", **identity)


def save(folder, step):
    return save_checkpoint(folder, info(step), {"weights": torch.full((3,), float(step))})


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    path = save(tmp_path, 7)
    loaded, training = load_checkpoint(path)
    assert loaded.model_copy(update={"files": {}}) == info(7)
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
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
    for other in (".step-50.partial", "step-050", "step-60x", "step-"):
        (tmp_path / other).mkdir()
    (tmp_path / "step-70").touch()
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
    assert (tmp_path / ".step-3.discarded" / "training.json").exists()
    assert latest_checkpoint(tmp_path) is not None


def test_a_save_that_finds_no_room_leaves_nothing_behind(tmp_path, monkeypatch):
    save(tmp_path, 3)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, 5)
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "latest"}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("keep", [0, 20])
def test_a_checkpoint_cut_short_is_refused_by_name(tmp_path, file, keep):
    path = save(tmp_path, 3)
    (path / file).write_bytes((path / file).read_bytes()[:keep])
    with pytest.raises(RunError, match="step-3 is damaged"):
        load_checkpoint(path)


def test_a_checkpoint_that_its_writer_removes_while_it_is_read_is_not_called_damaged(tmp_path, monkeypatch, caplog):
    save(tmp_path, 3)

    def load_late(path):
        if path.name == "step-3":
            save(tmp_path, 5)
            remove_checkpoints(tmp_path, keep={5})
        return load_checkpoint(path)

    monkeypatch.setattr("thermopile.trainer.checkpoints.checkpoint_files.load_checkpoint", load_late)
    assert load_latest(tmp_path).path == tmp_path / "step-5"
    assert caplog.messages == []


def cut_short(path):
    (path / "tensors.safetensors").write_bytes((path / "tensors.safetensors").read_bytes()[:20])


@pytest.mark.parametrize("damage", [cut_short, lambda path: (path / "checkpoint.json").unlink()])
def test_where_the_newest_checkpoint_is_damaged_the_newest_whole_one_is_taken(tmp_path, caplog, damage):
    for step in (3, 5, 40):
        save(tmp_path, step)
    cut_short(tmp_path / "step-5")
    damage(tmp_path / "step-40")
    path, loaded, training, _ = load_latest(tmp_path)
    assert (path.name, loaded.step, training["weights"][0]) == ("step-3", 3, 3)
    for step in (40, 5):
        assert f"step-{step} is damaged" in caplog.text
    assert "Resuming from step 3, the newest intact checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("pointer", "words"),
    [
        ("step-3", "names step-3,"), ("step-99", "names step-99,"), ("../../x", "names '../../x', which is not step-N"),
        ("", "names '', which"), ("\0" * 1000, "names none"), (None, "names none (No such file"),
    ],
)  # fmt: skip
def test_where_latest_does_not_name_the_newest_checkpoint_it_is_taken_and_said(tmp_path, caplog, pointer, words):
    for step in (3, 5):
        save(tmp_path, step)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    assert load_latest(tmp_path)[0].name == "step-5"
    assert f"{tmp_path / 'latest'} {words}" in caplog.text
    assert "the newest checkpoint is step-5. Resuming from step 5" in caplog.text


def test_a_whole_latest_checkpoint_is_taken_without_a_word(tmp_path, caplog):
    assert load_latest(tmp_path) is None
    save(tmp_path, 3)
    save(tmp_path, 5)
    assert load_latest(tmp_path)[0] == tmp_path / "step-5"
    assert not caplog.text


def test_where_all_checkpoints_are_damaged_the_newest_is_named(tmp_path):
    for step in (3, 5):
        cut_short(save(tmp_path, step))
    with pytest.raises(RunError, match=r"step-5 is damaged .* No earlier checkpoint is intact; start a new run"):
        load_latest(tmp_path)


@pytest.mark.parametrize("file", [*FILES, "latest"])
def test_a_flipped_bit_names_its_file_in_an_error_or_a_warning_or_changes_nothing(tmp_path, caplog, file):
    path, before = save(tmp_path, 3), info(3)
    target = tmp_path / "latest" if file == "latest" else path / file
    whole = target.read_bytes()
    for place in random.Random(1).sample(range(8 * len(whole)), 40):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        target.write_bytes(flipped)
        caplog.clear()
        if file != "latest":
            with pytest.raises(RunError, match=rf"{re.escape(str(path))} is damaged .*{file}"):
                load_latest(tmp_path)
            continue
        _, loaded, training, _ = load_latest(tmp_path)
        assert loaded.model_copy(update={"files": {}}) == before
        assert training["weights"].tolist() == [3, 3, 3]
        assert str(target) in caplog.text or bytes(flipped).strip() == whole.strip()


# Another format, or another person's checkpoint


def rewrite(path, **fields):
    """Change checkpoint.json as somebody does who can compute a checksum."""
    file = path / "checkpoint.json"
    file.write_bytes(seal_document(unseal(file.read_bytes()) | fields))


def test_a_checkpoint_of_a_later_format_is_refused_by_number(tmp_path):
    rewrite(save(tmp_path, 3), format=3, news=True)
    with pytest.raises(RunError, match="step-3 has checkpoint format 3, but this version of thermopile reads format 2"):
        load_latest(tmp_path)


def with_files(path, **texts):
    """Replace files, `name__suffix`, and have checkpoint.json vouch for them."""
    from thermopile.storage.files import sha256_of

    files = {}
    for name in FILES[1:]:
        file = path / name
        if (text := texts.get(name.replace(".", "__"))) is not None:
            file.write_bytes(text)
        files[name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    rewrite(path, files=files)


def replaced(name, make):
    def replace(path):
        (path / name).unlink()
        make(path / name)

    return replace


@pytest.mark.parametrize(
    "spoil",
    [
        *(replaced(name, os.mkfifo) for name in FILES),
        *(replaced(name, lambda file: file.symlink_to("/dev/zero")) for name in FILES),
        *(replaced(name, lambda file: file.symlink_to(file)) for name in FILES),
        *(replaced(name, Path.mkdir) for name in FILES),
        lambda path: rewrite(path, step="three"),
        lambda path: rewrite(path, step=10**30),
        lambda path: rewrite(path, step=4),
        lambda path: rewrite(path, files=None),
        lambda path: rewrite(path, files={}),
        lambda path: rewrite(path, settings=[1]),
        lambda path: rewrite(path, more=1),
        lambda path: (path / "checkpoint.json").write_bytes(b"[" * 100_000),
        lambda path: os.truncate(path / "checkpoint.json", 1 << 40),
        lambda path: os.truncate(path / "tensors.safetensors", 1 << 40),
        lambda path: with_files(path, training__json=b"[" * 100_000),
        lambda path: with_files(path, training__json=b'{"weights": ' + b"[" * 900 + b"]" * 900 + b"}"),
        lambda path: with_files(path, training__json=b"[]"),
        lambda path: with_files(path, training__json=b"{}"),
        lambda path: with_files(path, training__json=b'{"weights": {"$tensor": "other"}}'),
        lambda path: with_files(path, tensors__safetensors=b""),
        lambda path: with_files(path, tensors__safetensors=b"\xff" * 8 + b"{}"),
        lambda path: with_files(path, tensors__safetensors=(1 << 20).to_bytes(8, "little") + b"[" * (1 << 20)),
        lambda path: with_files(path, tensors__safetensors=header({"dtype": "F32", "shape": [1 << 40]})),
        lambda path: with_files(path, tensors__safetensors=header({"dtype": "F32", "shape": [1 << 40, 0, 1 << 40]})),
        lambda path: with_files(path, tensors__safetensors=header({"dtype": "C999", "shape": []})),
    ],
)
def test_a_hostile_checkpoint_is_one_error_that_names_it(tmp_path, spoil):
    path = save(tmp_path, 3)
    spoil(path)
    with pytest.raises(DamagedCheckpointError, match=rf"{re.escape(str(path))} is damaged \([^\n]+\)\.$"):
        load_checkpoint(path)


def header(tensor):
    text = json.dumps({"weights": tensor | {"data_offsets": [0, 4]}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4)


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero"), Path.mkdir])
def test_a_pointer_that_is_no_file_holds_nothing_up(tmp_path, caplog, make):
    save(tmp_path, 3)
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    assert load_latest(tmp_path)[0].name == "step-3"
    assert f"{tmp_path / 'latest'} names none" in caplog.text


@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoints/step-3", "checkpoints/.step-3.partial", "checkpoints/latest"]
)
def test_nothing_is_written_or_deleted_through_a_link(tmp_path, name):
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (outside / "precious").write_text("keep me")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside / "precious" if name.endswith("latest") else outside)
    folder = run / "checkpoints"
    if name in ("checkpoints", "checkpoints/.step-3.partial"):
        with pytest.raises(OSError, match=re.escape(name)):
            save(folder, 3)
    else:
        save(folder, 3)
        remove_checkpoints(folder, keep={})
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "keep me"
