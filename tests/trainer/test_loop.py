"""The run: the same losses however often it is killed, and state that agrees with the weights."""

import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from thermopile.pipeline.dataset import Dataset
from thermopile.state_store import StateReader
from thermopile.trainer.checkpoint import latest_checkpoint
from thermopile.trainer.config import load_config, to_toml
from thermopile.trainer.errors import ConfigError, TrainingError
from thermopile.trainer.loop import Trainer, resolve
from thermopile.trainer.run_directory import RunDirectory


def small(dataset: Dataset, **more):
    tree = {"epochs": 2, "batch_size": 256, "log_every": 1, "data": {"path": str(dataset.path), "image_size": 32}}
    return resolve(load_config(tree | more), dataset)


def train(config, path):
    run = RunDirectory(path)
    with Trainer.open(config, run) as trainer:
        trainer.run()
    return run


def lines(run):
    return [json.loads(line) for line in run.metrics_file.read_text().splitlines()]


def losses(run):
    return {line["step"]: line["loss"] for line in lines(run)}


@pytest.fixture(scope="module")
def finished(pairs_dataset, tmp_path_factory):
    """2 epochs of 7 steps, 256 pairs each."""
    return train(small(pairs_dataset), tmp_path_factory.mktemp("runs") / "run")


def test_every_step_is_logged_once_with_loss_temperatures_and_waits(finished):
    assert [line["step"] for line in lines(finished)] == list(range(1, 15))
    expected = {"loss", "learning_rate", "first/tau_mean", "second/tau_mean", "data_wait_seconds", "store_wait_seconds"}
    assert all(expected <= line.keys() for line in lines(finished))


def test_the_last_checkpoint_holds_the_state_of_the_last_step(finished, pairs_dataset):
    assert latest_checkpoint(finished.checkpoints).name == "step-14"
    state = StateReader.open(finished.state)
    assert state.snapshot.step == 14
    visits, last_step = state.column("visits"), state.column("last_step")
    assert visits.sum() == 14 * 256
    assert last_step.max() == 14
    seen = visits > 0
    assert np.isfinite(state.column("first/log_s")[seen]).all()
    assert np.isneginf(state.column("first/log_s")[~seen]).all()
    assert (state.column("second/tau")[~seen] == np.float32(0.01)).all()


def test_two_runs_of_one_seed_are_equal_bit_for_bit_and_another_seed_is_not(finished, pairs_dataset, tmp_path):
    again = train(small(pairs_dataset), tmp_path / "again")
    other = train(small(pairs_dataset, seed=1, epochs=1), tmp_path / "other")
    assert losses(again) == losses(finished)
    assert losses(other)[1] != losses(finished)[1]


def test_images_train_unimodally_with_two_views(images_dataset, tmp_path):
    run = train(small(images_dataset, epochs=1, batch_size=64), tmp_path / "run")
    assert "sample/tau_mean" in lines(run)[0]
    assert run.config().objective.mode == "unimodal"


def test_the_loss_falls_and_the_learned_temperature_of_clip_is_trained(pairs_dataset, tmp_path):
    config = small(pairs_dataset, epochs=6, objective={"name": "clip"}, optimizer={"warmup_steps": 5})
    run = train(config, tmp_path / "run")
    values = list(losses(run).values())
    assert np.mean(values[-7:]) < np.mean(values[:7]) - 0.3
    training = torch.load(latest_checkpoint(run.checkpoints) / "training.pt", weights_only=True)
    assert training["objective"]["log_logit_scale"] != pytest.approx(np.log(1 / 0.07))


def test_a_loss_that_is_not_finite_stops_the_run(pairs_dataset, tmp_path):
    config = small(pairs_dataset, optimizer={"lr": 1e30, "warmup_steps": 0})
    with pytest.raises(TrainingError, match="loss is nan at step"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": {"rhoo": 1}}, "no setting 'rhoo' .*did you mean 'rho'"),
        ({"objective": {"name": "isoclr"}}, "'isoclr' is unknown .*did you mean 'isogclr'"),
        ({"objective": {"name": "clip", "mode": "unimodal"}}, "'clip' has no mode 'unimodal'"),
        ({"objective": {"tau_min": 0.5}}, "tau_min 0.5"),
    ],
)
def test_settings_of_the_objective_are_checked_before_a_run_begins(pairs_dataset, change, message):
    with pytest.raises(ConfigError, match=message):
        small(pairs_dataset, **change)


def test_the_recorded_settings_leave_nothing_to_defaults(finished):
    recorded = finished.config()
    assert recorded.objective.settings["gamma"] == 0.8
    assert (recorded.objective.mode, recorded.data.recipe) == ("bimodal", "clip")
    assert (recorded.model.image.name, recorded.model.text.name) == ("conv", "mean_embedding")
    assert recorded.canonical_shards == 8
    assert "auto" not in to_toml(recorded).replace('device = "auto"', "")


def test_reports_count_the_steps_since_the_last_one(pairs_dataset, tmp_path):
    config, run = small(pairs_dataset, log_every=5, checkpoint={"every_steps": 3}), RunDirectory(tmp_path / "run")
    reports = []
    with Trainer.open(config, run) as trainer:
        trainer.run(reports.append)
    assert [report.step for report in reports] == [3, 5, 6, 9, 10, 12, 14]
    assert all(report.samples_per_second > 0 for report in reports)
    assert all(0 <= report.data_wait + report.store_wait <= 1 for report in reports)


def start(dataset, out):
    settings = ("epochs=6", "batch_size=128", "log_every=1", "data.image_size=32", "checkpoint.every_steps=7")
    command = [sys.executable, "-m", "thermopile.tools.cli", "train", "--data", dataset.path, "--out", out, "--resume"]
    overrides = [part for setting in settings for part in ("--set", setting)]
    return subprocess.Popen([*map(str, command), *overrides], stderr=subprocess.PIPE, text=True)


def finish(process):
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def kill_once_it_has_made(process, run, steps):
    while len(run.metrics_file.read_text().splitlines()) < steps if run.metrics_file.exists() else True:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_a_run_killed_and_resumed_has_the_losses_of_one_never_killed(pairs_dataset, tmp_path, kills):
    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    finish(start(pairs_dataset, whole.path))
    steps = len(losses(whole))
    assert steps == 90
    for target in sorted(random.Random(kills).sample(range(2, steps), kills)):
        kill_once_it_has_made(start(pairs_dataset, broken.path), broken, target)
    finish(start(pairs_dataset, broken.path))
    assert [line["step"] for line in lines(broken)] == list(range(1, 91))
    assert losses(broken) == losses(whole)
    one, other = StateReader.open(whole.state), StateReader.open(broken.state)
    for column in (*one.fields, "visits", "last_step"):
        np.testing.assert_array_equal(one.column(column), other.column(column))
