"""A fork of a run: the run itself from a checkpoint on, but for what was changed."""

import json
import os
import random
import re
import shutil
import subprocess

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.state_store import forking as forking_module
from thermopile.storage.bucket import Address
from thermopile.storage.files import NotRegularFileError
from thermopile.storage.local import LocalPath
from thermopile.storage.place import duplicate
from thermopile.storage.selection import Selection
from thermopile.trainer.checkpoints.checkpoint_files import remove_checkpoints
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run import fork as fork_module
from thermopile.trainer.run import restoring
from thermopile.trainer.run_directory import RunDirectory, read_lineage

from support.cli import answer, assert_one_line, cli, sets, succeed
from support.conversions import append_glyphs
from support.programs import program
from support.runs import (
    MOMENTUM,
    SMALL,
    assert_same_run,
    checkpoints,
    finish,
    lines,
    losses,
    resumed,
    small,
    snapshots,
    train,
)

RECORDER = "support.own_trackers:Recorder"
KEEPING = {"checkpoint": {"every_steps": 4, "every_minutes": 0, "keep_every": 4}}


@pytest.fixture(scope="module")
def whole(pairs_dataset, tmp_path_factory):
    """A run of 14 steps with checkpoints at 4, 8, 12 and 14."""
    return train(small(pairs_dataset, **KEEPING), tmp_path_factory.mktemp("whole") / "run")


def fork(source, out, *words):
    succeed("fork", source, "--out", out, *words)
    return RunDirectory(out)


def at(run, step):
    return f"{run.path}@step-{step}"


def contents(run):
    """Path → bytes and time of change of every file of a run."""
    files = (path for path in run.path.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def goes_on(forked, step):
    return resumed(forked.config(), forked, from_step=step)


# Without changes


def test_a_fork_without_changes_goes_on_as_the_run_did_and_the_run_is_not_touched(whole, tmp_path):
    before = contents(whole)
    forked = fork(at(whole, 8), tmp_path / "fork")
    assert losses(forked) == {step: loss for step, loss in losses(whole).items() if step <= 8}
    assert (checkpoints(forked), snapshots(forked)) == ({8}, {0, 8})
    goes_on(forked, 8)
    assert_same_run(forked, whole)
    assert contents(whole) == before


def test_a_fork_of_the_latest_checkpoint_is_the_finished_run_again(whole, tmp_path):
    forked = fork(whole.path, tmp_path / "fork")
    assert_same_run(forked, whole)
    assert "finished" in succeed("status", forked.path).output


def test_training_on_comes_next_only_where_steps_are_left(whole, tmp_path):
    done = succeed("fork", whole.path, "--out", tmp_path / "done").stdout
    assert done.endswith(" is a run whose steps are all done; to train on, fork with --set of more epochs\n")
    longer = succeed("fork", whole.path, "--out", tmp_path / "longer", "--set", "epochs=3").stdout
    assert longer.endswith(f"next: `thermopile train --out {tmp_path / 'longer'} --resume`\n")


@pytest.mark.wide
def test_a_fork_at_step_0_begins_again_with_the_weights_of_the_seed(whole, tmp_path, caplog):
    forked = fork(at(whole, 0), tmp_path / "fork")
    assert not forked.state.exists()
    goes_on(forked, 0)
    assert "has no checkpoint" not in caplog.text
    assert_same_run(forked, whole)


WINDOWS = (
    "order.canonical_shards=2", "order.blocks_per_shard=15", "order.window_blocks=4", "state.memory_budget=30KB",
    "micro_batch=64",
    "batch_size=128", "epochs=1", "data.image_size=16", "model.dim=16", "model.image.config.width=4",
    "checkpoint.every_steps=5", "checkpoint.keep_every=5", "log_every=1", "model.ema=0.9", *MOMENTUM,
)  # fmt: skip


@pytest.mark.wide
def test_windows_micro_batches_and_a_momentum_network_go_on_likewise(pairs_dataset, tmp_path):
    settings = [each for each in WINDOWS if "batch_norm" not in each]
    succeed("train", "--data", pairs_dataset.path, "--out", tmp_path / "whole", *sets(*settings))
    forked = fork(f"{tmp_path / 'whole'}@step-5", tmp_path / "fork")
    succeed("train", "--out", forked.path, "--resume")
    assert_same_run(forked, RunDirectory(tmp_path / "whole"))


@pytest.mark.wide
def test_two_ranks_go_on_likewise(pairs_dataset, tmp_path, start_ranks):
    run = RunDirectory(tmp_path / "whole")
    keeping = ("checkpoint.every_steps=4", "checkpoint.keep_every=4", "order.canonical_shards=2")
    words = ("--data", pairs_dataset.path, *sets(*SMALL, *keeping))
    finish(start_ranks(2, "train", "--out", run.path, *words))
    forked = fork(at(run, 8), tmp_path / "fork")
    finish(start_ranks(2, "train", "--out", forked.path, "--resume"))
    assert_same_run(forked, run)


# Files


def test_a_fork_shares_what_nothing_changes_and_writes_the_rest(whole, tmp_path):
    """Its disk beside its origin is what it writes itself: all files with one name."""
    forked = fork(at(whole, 8), tmp_path / "fork")
    files = [path for path in forked.path.rglob("*") if path.is_file()]
    shared = {str(path.relative_to(forked.path)) for path in files if path.stat().st_nlink > 1}
    assert {re.sub("[0-9A-Z]{20}", "ID", name) for name in shared} == {
        "checkpoints/step-8/tensors.safetensors", "checkpoints/step-8/training.json",
        "state/chunks/ID", "state/manifests/ID", "state/snapshots/ID",
    }  # fmt: skip
    own = sum(path.stat().st_size for path in files if path.stat().st_nlink == 1)
    assert own < 40_000 + forked.metrics_file.stat().st_size


@pytest.mark.wide
def test_origin_and_fork_each_lose_their_own_names_alone(whole, tmp_path):
    run = RunDirectory(shutil.copytree(whole.path, tmp_path / "run"))
    forked = fork(at(run, 8), tmp_path / "fork", *sets("checkpoint.keep_every=0", "checkpoint.keep_last=1"))
    shared = forked.checkpoints / "step-8" / "tensors.safetensors"
    assert shared.stat().st_nlink == 2
    goes_on(forked, 8)
    assert not shared.exists()
    assert at(run, 8) in succeed("fork", run.path, "--dry-run").stdout
    succeed("state", "check", run.path, "--all")
    shutil.rmtree(run.path)
    succeed("state", "check", forked.path, "--all")
    assert_same_run(forked, whole)


@pytest.mark.wide
def test_a_fork_on_another_file_system_is_a_copy(whole, tmp_path, monkeypatch):
    def other_file_system(*_, **__):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", other_file_system)
    forked = fork(at(whole, 12), tmp_path / "fork")
    assert all(path.stat().st_nlink == 1 for path in forked.path.rglob("*") if path.is_file())
    assert_same_run(goes_on(forked, 12), whole)


def test_neither_links_nor_pipes_are_taken_to_a_bucket_either(tmp_path, monkeypatch):
    def write(to, data):
        pytest.fail(f"{data} was opened")

    monkeypatch.setattr(Address, "write", write)
    (tmp_path / "link").symlink_to(__file__)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(NotRegularFileError, match=f"{name} is not a regular file"):
            duplicate(LocalPath(tmp_path / name), Address("bucket", name))


@pytest.mark.parametrize("place", ["state/chunks", "checkpoints/step-8/tensors.safetensors"])
def test_no_link_of_the_run_is_followed(whole, tmp_path, place):
    run = RunDirectory(shutil.copytree(whole.path, tmp_path / "run"))
    file = next(iter((run.path / place).iterdir())) if place == "state/chunks" else run.path / place
    for each in (run.path / place).iterdir() if place == "state/chunks" else [file]:
        shutil.move(each, tmp_path / each.name)
        each.symlink_to(tmp_path / each.name)
    assert_one_line(cli("fork", at(run, 8), "--out", tmp_path / "fork"), 1, "not a regular file")
    assert not (tmp_path / "fork").exists()
    assert not [*tmp_path.glob(".fork*")]


@pytest.mark.parametrize("file", ["state/chunks/*", "state/snapshots/*", "checkpoints/step-8/tensors.safetensors"])
def test_a_damaged_file_is_found_before_there_is_a_fork(whole, tmp_path, file):
    run = RunDirectory(shutil.copytree(whole.path, tmp_path / "run"))
    for path in run.path.glob(file):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    done = cli("fork", at(run, 8), "--out", tmp_path / "fork")
    assert_one_line(done, 1, f"{run.path} cannot be forked at step-8: ")
    assert ".partial" not in done.stderr
    assert not (tmp_path / "fork").exists()
    assert not [*tmp_path.glob(".fork*")]


def test_a_run_that_trains_is_forked_and_one_that_removes_the_checkpoint_is_forked_at_the_next(
    pairs_dataset, whole, tmp_path, monkeypatch, caplog
):
    """While step 8 is forked, it goes on to step 12 and keeps that alone."""
    run = RunDirectory(shutil.copytree(whole.path, tmp_path / "run"))
    remove_checkpoints(run.checkpoints, keep=[8, 4])
    real = forking_module.duplicate

    def duplicate(source, to):
        if (run.checkpoints / "step-8").exists():
            shutil.copytree(whole.checkpoints / "step-12", run.checkpoints / "step-12")
            remove_checkpoints(run.checkpoints, keep=[12])
            raise FileNotFoundError(source)
        real(source, to)

    monkeypatch.setattr(forking_module, "duplicate", duplicate)
    forked = fork(run.path, tmp_path / "fork")
    assert checkpoints(forked) == {12}
    assert "has removed step-4, step-8; starting over" in caplog.text
    assert_one_line(cli("fork", at(run, 8), "--out", tmp_path / "named"), 1, "no checkpoint 'step-8'", "step-12")


def test_a_checkpoint_that_is_removed_before_it_is_read_is_not_said_to_be_damaged(whole, tmp_path, monkeypatch):
    run = RunDirectory(shutil.copytree(whole.path, tmp_path / "run"))
    real = fork_module.checkpoint_files.read_info

    def read_info(file):
        remove_checkpoints(run.checkpoints, keep=[12])
        return real(file)

    monkeypatch.setattr(fork_module.checkpoint_files, "read_info", read_info)
    assert checkpoints(fork(run.path, tmp_path / "fork")) == {12}
    assert_one_line(cli("fork", at(run, 14), "--out", tmp_path / "named"), 1, "no checkpoint 'step-14'", "step-12")


@pytest.mark.wide
def test_the_lock_of_a_run_is_not_taken(pairs_dataset, tmp_path):
    config = small(pairs_dataset, **KEEPING)
    with Trainer.open(config, run := RunDirectory(tmp_path / "run")) as trainer:

        def report(report):
            if (run.checkpoints / "step-4").exists() and not (tmp_path / "fork").exists():
                fork(at(run, 4), tmp_path / "fork")

        trainer.train(report)
    assert_same_run(goes_on(RunDirectory(tmp_path / "fork"), 4), run)


@pytest.mark.parametrize("taken", ["a file", "a folder", "a run"])
def test_a_place_that_is_taken_is_left_alone(whole, tmp_path, taken):
    out = tmp_path / "fork"
    if taken == "a file":
        out.write_text("mine")
    elif taken == "a folder":
        out.mkdir()
        (out / "mine").write_text("mine")
    else:
        shutil.copytree(whole.path, out)
    before = sorted(out.rglob("*")) or out.read_text()
    assert_one_line(cli("fork", at(whole, 8), "--out", out), 2, out)
    assert (sorted(out.rglob("*")) or out.read_text()) == before


@pytest.mark.parametrize("name", [".fork.partial/mine", ".fork.lock"])
def test_a_file_or_folder_that_no_killed_fork_left_is_kept(whole, tmp_path, name):
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    assert_one_line(cli("fork", at(whole, 8), "--out", tmp_path / "fork"), 1, ".fork.partial", "rename it")
    assert mine.read_text() == "mine"
    assert not (tmp_path / "fork").exists()


@pytest.mark.wide
def test_of_two_forks_to_one_place_the_first_is_made_and_the_second_refused(whole, tmp_path, monkeypatch):
    out, second, real = tmp_path / "fork", [], fork_module.checkpoint_files.load_checkpoint

    def load_checkpoint(path):
        second.append(cli("fork", at(whole, 8), "--out", out))
        return real(path)

    monkeypatch.setattr(fork_module.checkpoint_files, "load_checkpoint", load_checkpoint)
    forked = fork(at(whole, 12), out)
    assert_one_line(second[0], 2, f"{out} holds a run")
    assert_same_run(goes_on(forked, 12), whole)
    assert not [*tmp_path.glob(".fork*")]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.wide), pytest.param(10**6, marks=pytest.mark.soak)]
)
def test_a_fork_killed_at_any_step_leaves_the_whole_fork_or_none_and_is_repeated(whole, tmp_path, kills):
    run = RunDirectory(shutil.copytree(whole.path, tmp_path / "run"))
    before, out = contents(run), tmp_path / "fork"
    steps = int(subprocess.check_output(program("forking", 0, at(run, 8), out)))
    out.rename(tmp_path / "unkilled")
    drawn = range(1, steps) if kills > steps else sorted(random.Random(1).sample(range(1, steps), kills))
    for step in [*drawn, steps]:
        done = subprocess.run(program("forking", step, at(run, 8), out), capture_output=True, check=False)
        assert done.returncode == 9, (step, done.stderr)
        assert out.exists() or step < steps
        if not out.exists():
            fork(at(run, 8), out)
        assert_same_run(RunDirectory(out), RunDirectory(tmp_path / "unkilled"))
        assert contents(run) == before
        shutil.rmtree(out)


def test_a_checkpoint_of_another_sample_order_is_neither_forked_nor_resumed(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(restoring, "ORDER_VERSION", 2)
    why = "step-14 was made with sample order 1, but this version uses order 2; go on with the version that started it"
    assert_one_line(cli("fork", whole.path, "--out", tmp_path / "fork"), 1, why)
    assert_one_line(cli("train", "--out", whole.path, "--resume"), 1, why)
    assert not (tmp_path / "fork").exists()


# Changes


@pytest.mark.wide
def test_a_rate_that_falls_from_the_fork_on_is_said_in_both_figures(whole, tmp_path):
    done = succeed("fork", at(whole, 8), "--out", tmp_path / "fork", *sets("epochs=3", "optimizer.cooldown=0.25"))
    assert "epochs: 2 → 3; optimizer.cooldown: 0.0 → 0.25" in done.output
    forked = RunDirectory(tmp_path / "fork")
    goes_on(forked, 8)
    first, second = ({line["step"]: line["learning_rate"] for line in lines(run)} for run in (whole, forked))
    assert {step: rate for step, rate in second.items() if step <= 8} == {step: first[step] for step in range(1, 9)}
    assert max(second) == 21
    assert len(checkpoints(forked)) > 1


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("seed=1", "it determines the order of the samples"),
        ("model.dim=32", "weights and state depend on it"),
        ("optimizer.weight_decay=0.1", "it is restored from the checkpoint"),
        ("data.select=ids.parquet", "cannot be read"),
        ("epochs=1", "step-8 is after the end of these settings, 7 steps"),
        ("nonsense=1", "nonsense"),
    ],
)
def test_what_no_fork_can_change_is_refused_with_the_reason(whole, tmp_path, setting, why):
    assert_one_line(cli("fork", at(whole, 8), "--out", tmp_path / "fork", "--set", setting), 2, why)
    assert not (tmp_path / "fork").exists()


def test_a_step_without_a_checkpoint_is_refused_with_those_that_there_are(whole, tmp_path):
    assert_one_line(
        cli("fork", at(whole, 5), "--out", tmp_path / "fork"), 1, "step-5'; available: step-0, step-4, step-8"
    )


def test_settings_are_those_of_the_checkpoint_and_later_ones_are_named(pairs_dataset, whole, tmp_path, caplog):
    run = RunDirectory(shutil.copytree(whole.path, tmp_path / "run"))
    often = whole.config().checkpoint.model_copy(update={"every_steps": 2})
    free = whole.config().model_copy(update={"log_every": 7, "checkpoint": often})
    run.record(free.model_copy(update={"epochs": 5}))
    forked = fork(at(run, 8), tmp_path / "fork")
    assert forked.config() == free  # what affects no result is as it is now
    assert "has changed since step-8; a fork has the settings of that step: epochs: 2 → 5" in caplog.text


@pytest.mark.wide
def test_weights_are_taken_and_ids_come_from_the_runs_own_copy(pairs_dataset, tmp_path):
    ids = np.arange(0, 2_000, 2)
    for name, columns in {"ids": {"sample_id": ids}, "weights": {"sample_id": ids, "weight": 1.0 + ids % 3}}.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    data = {"path": str(pairs_dataset.path), "image_size": 16, "select": str(tmp_path / "ids.parquet")}
    run = train(small(pairs_dataset, batch_size=128, data=data, **KEEPING), tmp_path / "run")
    (tmp_path / "ids.parquet").unlink()
    forked = fork(at(run, 8), tmp_path / "fork", "--weights", tmp_path / "weights.parquet")
    own = Selection(forked.selection)
    np.testing.assert_array_equal(own.ids, ids)
    np.testing.assert_allclose(own.weights, (1.0 + ids % 3) / (1.0 + ids % 3).mean(), rtol=1e-6)
    goes_on(forked, 8)
    differing = {step for step, loss in losses(forked).items() if loss != losses(run)[step]}
    assert min(differing) == 9
    (tmp_path / "weights.parquet").unlink()
    again = fork(at(forked, 12), tmp_path / "again")
    assert_same_run(goes_on(again, 12), forked)


@pytest.mark.wide
def test_a_dataset_at_another_place_is_taken_and_one_that_grew_as_it_was(pairs_dataset, whole, tmp_path):
    moved = shutil.copytree(pairs_dataset.path, tmp_path / "moved")
    forked = fork(at(whole, 12), tmp_path / "fork", "--data", moved)
    assert forked.config().data.path == str(moved)
    append_glyphs(moved, np.arange(0, 10_847, 500))
    assert_same_run(goes_on(fork(at(whole, 12), tmp_path / "other", "--data", moved), 12), whole)


@pytest.mark.wide
def test_another_dataset_is_refused(whole, images_dataset, noise_dataset, tmp_path):
    """By the state, too, should the run's facts of its dataset be lost."""
    bare = RunDirectory(shutil.copytree(whole.path, tmp_path / "bare"))
    bare.trained_on.unlink()
    for run in (whole, bare):
        done = cli("fork", at(run, 12), "--out", tmp_path / "fork", "--data", noise_dataset.path)
        assert_one_line(done, 2, f"{noise_dataset.place} is not the dataset of {run.path}")


def test_code_that_only_the_run_names_is_not_imported(whole, tmp_path):
    run = RunDirectory(shutil.copytree(whole.path, tmp_path / "run"))
    run.record(run.config().model_copy(update={"trackers": ("hostile:Tracker",)}))
    assert_one_line(cli("fork", at(run, 0), "--out", tmp_path / "fork"), 2, "trackers = 'hostile:Tracker'")


@pytest.mark.wide
def test_code_that_the_run_names_since_the_checkpoint_is_neither_imported_nor_taken(whole, tmp_path):
    run = RunDirectory(shutil.copytree(whole.path, tmp_path / "run"))
    hostile = whole.config().objective.model_copy(update={"name": "hostile:Objective"})
    run.record(whole.config().model_copy(update={"objective": hostile}))
    assert fork(at(run, 8), tmp_path / "fork").config() == whole.config()
    assert_one_line(cli("fork", at(run, 0), "--out", tmp_path / "other"), 2, "objective.name = 'hostile:Objective'")


# Origins


@pytest.mark.wide
def test_a_fork_has_an_id_of_its_own_and_shows_the_runs_that_it_came_from(whole, tmp_path):
    first = fork(at(whole, 12), tmp_path / "first", "--set", "epochs=3")
    second = fork(at(first, 12), tmp_path / "second")
    ids = [read_lineage(run.lineage_file).id for run in (whole, first, second)]
    assert len({*ids}) == 3
    tree = [
        f"{whole.path} ({ids[0]})",
        f"└─ step 12: {first.path} ({ids[1]}): epochs: 2 → 3",
        f"└─── step 12: this run ({ids[2]}): nothing changed",
    ]
    said = succeed("status", second.path).output
    inspected = succeed("inspect", second.path).output
    page = (second.report / "report.html").read_text()
    for line in tree:
        assert all(line in shown for shown in (said, inspected, page))
    assert [origin["step"] for origin in answer("status", second.path)["lineage"]["origins"]] == [12, 12]
    assert "origin" not in succeed("status", whole.path).output


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.write_bytes(b"x" * (65 << 20))])
def test_a_run_whose_run_json_is_no_such_file_has_no_origin(whole, tmp_path, caplog, make):
    make(tmp_path / "run.json")
    assert read_lineage(LocalPath(tmp_path / "run.json")) is None
    assert "run.json is damaged, so the run's origin is unknown: " in caplog.text


@pytest.mark.wide
def test_trackers_get_the_id_of_the_fork_and_only_its_own_steps(pairs_dataset, tmp_path):
    run = train(small(pairs_dataset, **KEEPING, trackers=[RECORDER]), tmp_path / "run")
    forked = fork(at(run, 8), tmp_path / "fork", "--set", f'trackers=["{RECORDER}"]')
    goes_on(forked, 8)
    for each, first in ((run, 1), (forked, 9)):
        (file,) = each.path.glob("sent-*.jsonl")
        about, *sent = map(json.loads, file.read_text().splitlines())
        assert about["id"] == read_lineage(each.lineage_file).id
        assert sorted({line["step"] for line in sent if "step" in line}) == list(range(first, 15))


def test_dry_run_says_what_a_fork_would_be_at_every_kept_checkpoint(whole, tmp_path):
    done = succeed("fork", whole.path, "--dry-run", "--set", "optimizer.lr=0.002")
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == [
        at(whole, step) for step in (0, 4, 8, 12, 14)
    ]
    assert "step-8: 8 of 14 steps are done; optimizer.lr: 0.001 → 0.002; the learning rate of the next" in done.stdout


def test_dry_run_says_why_one_checkpoint_cannot_be_forked_and_fails_if_none_can(whole):
    done = succeed("fork", whole.path, "--dry-run", "--set", "epochs=1")
    said = dict(line.removeprefix(f"{whole.path}@").split(": ", 1) for line in done.stdout.splitlines())
    assert said["step-4"].startswith("4 of 7 steps are done")
    assert said["step-8"].startswith("cannot be forked: step-8 is after the end of these settings, 7 steps")
    assert_one_line(cli("fork", whole.path, "--dry-run", "--set", "seed=1"), 2, "the order of the samples")
