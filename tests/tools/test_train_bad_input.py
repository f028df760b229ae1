"""`thermopile train` on runs, checkpoints and datasets that are damaged, gone or hostile: one line, or it goes on."""

import contextlib
import logging
import os
import random
import resource
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from thermopile.pipeline.dataset.index import seal_index
from thermopile.state_store.errors import SnapshotError
from thermopile.storage.sealed_json import seal_document, unseal
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint, save_checkpoint
from thermopile.trainer.config import load_config
from thermopile.trainer.errors import RunError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run import checkpoint_writer
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets, succeed
from support.runs import losses

train = partial(cli, "train")

TINY = ("batch_size=42", "data.image_size=16", "model.dim=8", "model.image.config.width=4", "log_every=1",
        "checkpoint.every_minutes=0", "checkpoint.every_steps=3",
        "optimizer.warmup=200")  # fmt: skip
FURTHER = ("--set", "epochs=2", "--allow-change", "epochs")


def start(dataset, out, *more):
    settings = sets(*TINY, "epochs=1")
    return train("--data", dataset.path, "--out", out, *settings, *more)


def resume(run, *more):
    return train("--out", run.path, "--resume", *FURTHER, *more)


@pytest.fixture(scope="module")
def seven_steps(images_dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    result = start(images_dataset, out)
    assert result.exit_code == 0, result.stderr
    return RunDirectory(out)


@pytest.fixture
def run(seven_steps, tmp_path):
    """A run of 7 steps with checkpoints of the last two saved, 6 and 7, for one test alone."""
    return RunDirectory(shutil.copytree(seven_steps.path, tmp_path / "run"))


@pytest.fixture(scope="module")
def further(seven_steps, tmp_path_factory):
    """The losses of 14 steps where nothing is damaged."""
    run = RunDirectory(shutil.copytree(seven_steps.path, tmp_path_factory.mktemp("further") / "run"))
    assert resume(run).exit_code == 0
    return losses(run)


# Places that cannot be written


def test_a_run_below_a_file_is_refused_with_the_path(images_dataset, tmp_path):
    (tmp_path / "file").touch()
    assert_one_line(start(images_dataset, tmp_path / "file" / "run"), 1, "cannot be written", tmp_path / "file" / "run")
    assert_one_line(start(images_dataset, tmp_path / "file"), 2, tmp_path / "file")


def test_a_file_where_the_checkpoints_belong_is_an_error_of_the_resumed_run(run):
    shutil.rmtree(run.checkpoints)
    run.checkpoints.touch()
    assert_one_line(resume(run), 1, f"{run.checkpoints} is not a directory; remove it")


def test_a_run_that_can_write_no_checkpoint_trains_on_and_fails_at_its_end(images_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 0.0)
    config = small(images_dataset)
    run = RunDirectory(tmp_path / "run")
    with Trainer.open(config, run) as trainer:
        run.checkpoints.touch()
        with pytest.raises(OSError, match="checkpoints"):
            trainer.train()
    assert len(losses(run)) == 7


def small(dataset):
    tree = {
        "epochs": 1, "batch_size": 42, "log_every": 1, "model": {"dim": 8, "image": {"config": {"width": 4}}},
        "data": {"path": str(dataset.path), "image_size": 16},
        "checkpoint": {"every_minutes": 0, "every_steps": 2, "keep_last": 9},
    }  # fmt: skip
    return resolve(load_config(tree), dataset)[0]


def room_for_files(size):
    """Let this process write files of no more bytes than that, so that further writes fail as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(
    images_dataset, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 0.0)
    # Of earlier commands: what they print goes to a file of pytest's, for which there is no room either.
    monkeypatch.setattr(logging.getLogger("thermopile"), "handlers", [])
    whole, run = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "run")
    with Trainer.open(small(images_dataset), whole) as trainer:
        trainer.train()

    def report(report):
        trainer.run.checkpointer.wait()
        if report.step == 3:
            room_for_files(1)
        if report.step == 5:
            assert latest_checkpoint(run.checkpoints).name == "step-2"
            room_for_files(resource.RLIM_INFINITY)

    try:
        with Trainer.open(small(images_dataset), run) as trainer:
            trainer.train(report)
    finally:
        room_for_files(resource.RLIM_INFINITY)
    assert "the checkpoint of step 4 was not written" in caplog.text
    assert "metrics.jsonl cannot be written" in caplog.text
    assert {path.name for path in run.checkpoints.iterdir()} == {"step-2", "step-6", "step-7", "latest"}
    assert losses(run) == losses(whole)


def on_warnings(do):
    """A handler that passes each warning of thermopile to a function."""
    handler = logging.Handler()
    handler.emit = lambda record: do(record.getMessage())
    return handler


@pytest.mark.parametrize("is_freed", [True, False])
def test_the_last_checkpoint_waits_for_room_on_a_full_disk_and_says_so_once(
    images_dataset, tmp_path, monkeypatch, is_freed
):
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 0.0)
    run, said = RunDirectory(tmp_path / "run"), []

    def warned(message):
        said.append(message.partition(":")[0])
        if is_freed and "step 7" in message:
            room_for_files(resource.RLIM_INFINITY)

    monkeypatch.setattr(logging.getLogger("thermopile"), "handlers", [on_warnings(warned)])

    def report(report):
        trainer.run.checkpointer.wait()
        if report.step == 3:
            room_for_files(1)

    try:
        with (
            contextlib.nullcontext() if is_freed else pytest.raises(SnapshotError, match="File too large"),
            Trainer.open(small(images_dataset), run) as trainer,
        ):
            trainer.train(report)
    finally:
        room_for_files(resource.RLIM_INFINITY)
    # During training, and again at its end, since the run waits there.
    assert said == ["metrics.jsonl cannot be written", *(f"the checkpoint of step {n} was not written" for n in (4, 7))]
    assert latest_checkpoint(run.checkpoints).name == ("step-7" if is_freed else "step-2")
    assert len(losses(run)) == (7 if is_freed else 3)


# Checkpoints


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path / "tensors.safetensors", 3000),
        pytest.param(lambda path: (path / "checkpoint.json").write_text("{"), marks=pytest.mark.wide),
        pytest.param(lambda path: (path / "training.json").unlink(), marks=pytest.mark.wide),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_run_resumes_from_the_one_before(run, further, damage):
    damage(run.checkpoints / "step-7")
    result = resume(run)
    assert result.exit_code == 0, result.stderr
    assert f"{run.checkpoints / 'step-7'} is damaged" in result.stderr
    assert "resuming at step 6" in result.stderr
    assert losses(run) == further


def rewrite(path, **fields):
    """Change checkpoint.json as somebody does who can compute a checksum."""
    info = path / "checkpoint.json"
    info.write_bytes(seal_document(unseal(info.read_bytes()) | fields))


@pytest.mark.parametrize(
    "snapshot",
    ["../../elsewhere\x1b[31m", *(pytest.param(name, marks=pytest.mark.wide)
                                  for name in ("ZZZZZZZZZZZZZZZZZZZ0", "../../elsewhere", "step-7\x1b[31m", ""))],
)  # fmt: skip
def test_a_checkpoint_of_a_missing_snapshot_is_passed_over_for_the_one_before(run, further, snapshot):
    rewrite(run.checkpoints / "step-7", snapshot=snapshot)
    result = resume(run)
    assert f"{run.state} has no snapshot" in result.stderr
    assert "Resuming from step-6" in result.stderr
    assert "\x1b" not in result.stderr
    assert losses(run) == further


def test_a_checkpoint_whose_state_is_damaged_is_passed_over_for_the_one_before(run, further):
    chunks = [path for path in (run.state / "chunks").rglob("*") if path.is_file()]
    newest = max(chunks, key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:10])
    result = resume(run)
    assert f"the state of {run.checkpoints / 'step-7'} is damaged" in result.stderr
    assert "Resuming from step-6" in result.stderr
    assert losses(run) == further


def test_a_checkpoint_whose_step_is_not_that_of_its_state_is_refused(run):
    (run.checkpoints / "step-7").rename(run.checkpoints / "step-8")
    rewrite(run.checkpoints / "step-8", step=8)
    assert_one_line(resume(run), 1, "step-8 is damaged: it is of step 8, its state snapshot of step 7")
    assert len(losses(run)) == 7


def spoil_optimizer_state(training):
    """State that a fused step, which goes by the size of the weight alone, would read behind its end."""
    for own in training["optimizer"]["weights"]["state"].values():
        own["exp_avg"] = torch.ones(1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (spoil_optimizer_state, "its exp_avg has shape [1], but the weight has"),
        (lambda training: training.update(optimizer=None), "does not match the run's settings"),
        (lambda training: training["optimizer"].update(weights=3), "does not match the run's settings"),
        (lambda training: training["encoders"].update({"image.head.bias": "x"}), "image.head.bias"),
        (lambda training: training.clear(), "'encoders'"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_by_name(run, change, reason):
    info, training = load_checkpoint(run.checkpoints / "step-7")
    change(training)
    save_checkpoint(run.checkpoints, info, training)
    assert_one_line(resume(run), 1, run.checkpoints / "step-7", reason)


# The dataset


def test_a_dataset_that_was_moved_is_found_with_data_and_missed_by_its_path_without(
    run, further, images_dataset, tmp_path
):
    gone, moved = tmp_path / "gone", shutil.copytree(images_dataset.path, tmp_path / "moved")
    config = run.config()
    run.record(config.model_copy(update={"data": config.data.model_copy(update={"path": str(gone)})}))
    assert_one_line(resume(run), 1, f"{gone} does not exist", "pass its new path with --data")
    result = resume(run, "--data", moved)
    assert result.exit_code == 0, result.stderr
    assert run.config().data.path == str(moved)
    assert losses(run) == further


def test_another_dataset_of_the_same_size_is_refused_by_its_fingerprint(run, images_dataset, tmp_path):
    other = shutil.copytree(images_dataset.path, tmp_path / "other")
    index = images_dataset.index.model_dump(exclude={"format", "fingerprint"})
    index["shard_digests"][0]["beton"] = "0" * 64  # as of other pixels
    (other / "dataset.json").write_bytes(seal_index(index))
    before = run.metrics_file.read_bytes()
    assert_one_line(resume(run, "--data", other), 2, f"{other} is not the dataset of {run.path}")
    assert run.metrics_file.read_bytes() == before
    assert resume(run).exit_code == 0


# The run's own files


@pytest.mark.parametrize("garbage", [b'{"step": 8, "lo', b"[" * 100_000 + b"\n"])
def test_a_log_that_ends_in_an_unreadable_line_is_reported_and_continued(run, further, garbage):
    with run.metrics_file.open("ab") as file:
        file.write(garbage)
    result = resume(run)
    assert result.exit_code == 0, result.stderr
    assert losses(run) == further
    assert f"{run.metrics_file}: a line cannot be read and moved to" in result.stderr


@pytest.mark.parametrize(
    "text", ["epochs = = 3", "epochs = 'many'", "[[", "a = " + "[" * 100_000, "no_such_setting = 1"]
)
def test_settings_that_are_damaged_are_named_as_the_runs_own(run, text):
    run.config_file.write_text(text)
    for more in ([], ["--accept-config"]):
        assert_one_line(resume(run, *more), 1, f"{run.config_file} is damaged")


# Settings edited by hand


def edit(run, old, new):
    text = run.config_file.read_text()
    assert text.count(old) == 1
    run.config_file.write_text(text.replace(old, new))


def test_settings_edited_by_hand_are_refused_until_accepted_and_then_recorded(run):
    edit(run, "lr = 0.001", "lr = 0.002")
    assert_one_line(resume(run), 1, f"{run.config_file} is damaged or was edited by hand", "--accept-config")
    result = resume(run, "--accept-config")
    assert result.exit_code == 0, result.stderr
    assert f"the settings have changed since {run.checkpoints / 'step-7'}: " in result.stderr
    assert "optimizer.lr: 0.001 → 0.002" in result.stderr
    assert "nothing to do" in train("--out", run.path, "--resume").stdout
    assert "optimizer.lr: 0.001 → 0.002" in run.warnings_file.read_text()


def test_settings_of_a_finished_run_are_accepted_too(run):
    edit(run, "log_every = 1", "log_every = 2")
    assert "nothing to do" in train("--out", run.path, "--resume", "--accept-config").stdout
    assert "nothing to do" in train("--out", run.path, "--resume").stdout


@pytest.mark.parametrize("last_line", ["", "# a note\n", '# sha256 = "0123"\n'])
def test_settings_without_their_checksum_count_as_edited(run, last_line):
    text = run.config_file.read_text()
    run.config_file.write_text(text[: text.index("# sha256")] + last_line)
    assert_one_line(resume(run), 1, "--accept-config")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("seed = 0\nepochs", "seed = 1\nepochs", "seed: the run has 0, asked for 1"),
        ("batch_size = 42", "batch_size = 32", "batch_size: the run has 42, asked for 32"),
        ("weight_decay = 0.02", "weight_decay = 0.03", "optimizer.weight_decay: the run has 0.02, asked for 0.03"),
        ("\ndim = 8", "\ndim = 16", "model.dim: the run has 8, asked for 16"),
    ],
)
def test_accepted_or_not_what_no_run_can_change_is_named(run, old, new, key):
    edit(run, old, new)
    before = run.metrics_file.read_bytes()
    assert_one_line(resume(run, "--accept-config"), 2, run.checkpoints / "step-7", key, "cannot change")
    assert run.metrics_file.read_bytes() == before


def test_another_run_s_settings_are_refused_though_they_are_whole(run, tmp_path):
    other = RunDirectory(tmp_path / "other")
    other.path.mkdir()
    other.record(run.config().model_copy(update={"seed": 7}))
    shutil.copyfile(other.config_file, run.config_file)
    assert_one_line(resume(run), 2, "seed: the run has 0, asked for 7")


def test_a_change_whose_run_was_killed_before_its_checkpoint_holds_on_resume(run, further):
    run.record(run.config().model_copy(update={"epochs": 2}))  # what a resume does first
    result = succeed("train", "--out", run.path, "--resume")
    assert "epochs: 1 → 2" in result.stderr
    assert losses(run) == further


def test_a_flipped_bit_in_the_settings_is_an_error_on_resume_and_a_warning_elsewhere(run, caplog):
    whole = run.config_file.read_bytes()
    for place in random.Random(3).sample(range(8 * len(whole)), 40):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        run.config_file.write_bytes(flipped)
        with pytest.raises(RunError, match=str(run.config_file)):
            run.config(edited="refuse")
        caplog.clear()
        with contextlib.suppress(RunError):
            run.config()
        assert str(run.config_file) in caplog.text


def test_commands_that_only_read_go_by_edited_settings_with_a_warning(run):
    edit(run, "log_every = 1", "log_every = 2")
    for command in ("status", "state check"):
        result = succeed(*command.split(), run.path)
        assert f"{run.config_file} was edited by hand or is damaged" in result.stderr


def test_a_directory_without_settings_is_no_run_and_nothing_in_it_is_touched(run, images_dataset):
    run.config_file.unlink()
    before = {path: path.stat().st_mtime_ns for path in sorted(Path(run.path).rglob("*"))}
    assert_one_line(start(images_dataset, run.path, "--resume"), 2, f"{run.path}", "--out")
    assert {path: path.stat().st_mtime_ns for path in sorted(Path(run.path).rglob("*"))} == before
