"""The run: the same losses however often it is killed, and state that agrees with the weights."""

import json
import random
import re
import shutil
import time
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.order import Order
from thermopile.state_store import SnapshotError, StateReader, list_snapshots
from thermopile.trainer import checkpointer, loop
from thermopile.trainer.build import resolve, windows_from
from thermopile.trainer.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from thermopile.trainer.config import load_config, to_toml
from thermopile.trainer.errors import ConfigError, RunError, TrainingError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.resume_settings import differences
from thermopile.trainer.run_directory import RunDirectory


def small(dataset: Dataset, **more):
    tree = {"epochs": 2, "batch_size": 256, "log_every": 1, "data": {"path": str(dataset.path), "image_size": 32}}
    return resolve(load_config(tree | more), dataset)


def train(config, path):
    run = RunDirectory(path)
    with Trainer.open(config, run) as trainer:
        trainer.run()
    return run


def stop_at(step):
    """A report that ends the run like Ctrl-C."""

    def report(report):
        if report.step == step:
            raise KeyboardInterrupt

    return report


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
    expected = {"loss", "learning_rate", "image/tau_mean", "text/tau_mean", "data_wait_seconds", "store_wait_seconds"}
    assert all(expected <= line.keys() for line in lines(finished))


def test_the_last_checkpoint_holds_the_state_of_the_last_step(finished, pairs_dataset):
    assert latest_checkpoint(finished.checkpoints).name == "step-14"
    state = StateReader.open(finished.state)
    assert state.snapshot.step == 14
    visits, last_step = state.column("visits"), state.column("last_step")
    assert visits.sum() == 14 * 256
    assert last_step.max() == 14
    seen = visits > 0
    assert np.isfinite(state.column("image/log_s")[seen]).all()
    assert np.isneginf(state.column("image/log_s")[~seen]).all()
    assert (state.column("text/tau")[~seen] == np.float32(0.01)).all()


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
    _, training = load_checkpoint(latest_checkpoint(run.checkpoints))
    assert training["objective"]["log_logit_scale"] != pytest.approx(np.log(1 / 0.07))


def test_a_loss_that_is_not_finite_stops_the_run_with_step_samples_and_the_last_checkpoint(
    pairs_dataset, tmp_path, monkeypatch
):
    config, run = small(pairs_dataset, log_every=4, checkpoint={"every_steps": 3}), RunDirectory(tmp_path / "run")
    with Trainer.open(config, run) as trainer:
        outcome = trainer._outcome

        def poisoned(*inputs):
            found = outcome(*inputs)
            return replace(found, loss=found.loss * np.nan) if trainer.steps_done == 6 else found

        monkeypatch.setattr(trainer, "_outcome", poisoned)
        ids = ", ".join(map(str, trainer.order.batch_ids(0, 6)[:8]))
        with pytest.raises(
            TrainingError, match=rf"the loss of step 7 is nan\. The ids of its 256 samples begin with {ids}: .*step-6,"
        ):
            trainer.run()
    assert checkpoints(run) == {3, 6}
    assert [line["step"] for line in lines(run)] == list(range(1, 7))


def test_features_that_are_not_finite_stop_the_run(pairs_dataset, tmp_path):
    config = small(pairs_dataset, optimizer={"lr": 1e30, "warmup_steps": 0})
    with pytest.raises(TrainingError, match=r"step \d+: features: row \d+ of first has norm nan.*lower learning rate"):
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


def test_an_objective_with_one_mode_has_it_whatever_the_data_holds(pairs_dataset):
    config = small(pairs_dataset, objective={"name": "simclr"})
    assert (config.objective.mode, config.data.recipe) == ("unimodal", "crop_flip")


def test_the_recorded_settings_leave_nothing_to_defaults(finished):
    recorded = finished.config()
    assert recorded.objective.settings["gamma"] == 0.8
    assert (recorded.objective.mode, recorded.data.recipe) == ("bimodal", "clip")
    assert (recorded.model.image.name, recorded.model.text.name) == ("conv", "mean_embedding")
    assert (recorded.canonical_shards, recorded.blocks_per_shard, recorded.window_blocks) == (8, 1, 1)
    assert "auto" not in to_toml(recorded).replace('device = "auto"', "")


def test_reports_count_the_steps_since_the_last_one(pairs_dataset, tmp_path):
    config, run = small(pairs_dataset, log_every=5, checkpoint={"every_steps": 3}), RunDirectory(tmp_path / "run")
    reports = []
    with Trainer.open(config, run) as trainer:
        trainer.run(reports.append)
    assert [report.step for report in reports] == [3, 5, 6, 9, 10, 12, 14]
    assert all(report.samples_per_second > 0 for report in reports)
    assert all(0 < sum(report.split.values()) - report.split["write_backlog"] <= 1.01 for report in reports)


# A memory for part of the rows: 2,000 rows of 32 bytes are 64,000.

WINDOWED = {"batch_size": 128, "canonical_shards": 2, "state": {"memory_budget": "40KB"}}


def with_budget(config, budget, **more):
    return config.model_copy(update={"state": config.state.model_copy(update={"memory_budget": budget} | more)})


def assert_same_state(one, other):
    one, other = StateReader.open(one.state), StateReader.open(other.state)
    for column in (*one.fields, "visits", "last_step"):
        np.testing.assert_array_equal(one.column(column), other.column(column))


@pytest.fixture(scope="module")
def resident(pairs_dataset, tmp_path_factory):
    """2 epochs of a windowed order, every row in memory all the time."""
    config = with_budget(small(pairs_dataset, **WINDOWED), None)
    return train(config, tmp_path_factory.mktemp("runs") / "resident")


def test_a_budget_for_fewer_rows_than_there_are_makes_the_order_windowed(pairs_dataset):
    config = small(pairs_dataset, **WINDOWED)
    assert (config.canonical_shards, config.window_blocks) == (2, 4)
    assert config.blocks_per_shard > 10


@pytest.mark.parametrize("budget", ["64KB", "1TB", "none"])
def test_a_budget_for_all_rows_changes_nothing(pairs_dataset, budget):
    assert with_budget(small(pairs_dataset, state={"memory_budget": budget}), None) == small(pairs_dataset)


def test_a_run_with_few_rows_in_memory_equals_one_with_all_bit_for_bit(resident, pairs_dataset, tmp_path):
    run = RunDirectory(tmp_path / "run")
    with Trainer.open(small(pairs_dataset, **WINDOWED), run) as trainer:
        trainer.run()
        all_blocks = -(-pairs_dataset.n // trainer.order.block_rows)
        # About once an epoch, not once a step: the store was told the windows.
        assert all_blocks < trainer.store.blocks_read < 3 * all_blocks
    assert losses(run) == losses(resident)
    assert_same_state(run, resident)


def test_a_windowed_run_stopped_within_an_epoch_goes_on_with_another_budget(resident, pairs_dataset, tmp_path):
    config, run = small(pairs_dataset, **WINDOWED, checkpoint={"every_steps": 4}), RunDirectory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), Trainer.open(config, run) as trainer:
        trainer.run(stop_at(11))
    other = resolve(with_budget(config, 30_000, prefetch_steps=5), pairs_dataset)
    assert differences(config, other) == []
    with Trainer.open(other, run, resume=True) as trainer:
        assert trainer.steps_done == 8
        trainer.run()
    assert losses(run) == losses(resident)
    assert_same_state(run, resident)


@pytest.mark.parametrize("tree", [{}, WINDOWED, {"window_blocks": 3, "blocks_per_shard": 7}, {"blocks_per_shard": 9}])
def test_a_budget_too_small_for_the_order_is_refused_with_one_that_would_do(pairs_dataset, tree):
    with pytest.raises(ConfigError, match=r"memory_budget = 300 holds 9 rows of 32 bytes, but") as refusal:
        small(pairs_dataset, **tree | {"state": {"memory_budget": 300}})
    enough = int(re.search(r"to at least ([\d,]+)", str(refusal.value))[1].replace(",", ""))
    small(pairs_dataset, **tree | {"state": {"memory_budget": enough}})
    with pytest.raises(ConfigError, match="at least"):
        small(pairs_dataset, **tree | {"state": {"memory_budget": enough - 1}})


@pytest.mark.parametrize("steps_done", [0, 1, 20, 29, 30, 31, 59])
def test_the_store_is_told_the_windows_of_every_step_to_come_in_the_numbers_of_its_puts(steps_done):
    order = Order.create(2_000, 64, canonical_shards=2, blocks_per_shard=20, window_blocks=4)
    assert order.steps_per_epoch == 31
    told = list(windows_from(steps_done, order, 2))
    assert [window.first_step for window in told] == sorted(window.first_step for window in told)
    for put in range(steps_done + 1, 2 * 31 + 1):
        blocks = np.unique(order.batch_ids(*divmod(put - 1, 31)) // order.block_rows)
        live = [window.blocks for window in told if window.first_step <= put <= window.last_step]
        assert np.isin(blocks, np.concatenate(live)).all()
    assert all(steps_done < window.last_step <= 2 * 31 for window in told)


@pytest.mark.parametrize("ahead", [1, 5])
def test_rows_of_each_step_are_prefetched_once_so_many_steps_ahead_also_across_epochs(
    pairs_dataset, tmp_path, monkeypatch, ahead
):
    config = small(pairs_dataset, state={"prefetch_steps": ahead})
    seen = []

    def recorded(name, real):
        def call(ids):
            seen.append((name, step_of[np.asarray(ids).tobytes()]))
            return real(ids)

        return call

    with Trainer.open(config, RunDirectory(tmp_path / "run")) as trainer:
        step_of = {trainer.order.batch_ids(*divmod(step, 7)).tobytes(): step for step in range(14)}
        monkeypatch.setattr(trainer.store, "prefetch", recorded("prefetch", trainer.store.prefetch))
        monkeypatch.setattr(trainer.store, "take", recorded("take", trainer.store.take))
        trainer.run()
    assert [step for name, step in seen if name == "take"] == list(range(14))
    assert [step for name, step in seen if name == "prefetch"] == list(range(1, 14))
    for step in range(14):
        before_the_next = seen[: seen.index(("take", step + 1))] if step < 13 else seen
        assert max(before_the_next, key=lambda event: event[1])[1] == min(step + ahead, 13)


def test_a_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(finished, pairs_dataset, tmp_path, caplog):
    config, run = small(pairs_dataset, checkpoint={"every_steps": 3}), RunDirectory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), Trainer.open(config, run) as trainer:
        trainer.run(stop_at(8))
    (run.checkpoints / "step-6" / "tensors.safetensors").write_bytes(b"")
    with Trainer.open(config, run, resume=True) as trainer:
        assert trainer.steps_done == 3
        assert checkpoints(run) == {3}, "a checkpoint is left whose state was undone"
        trainer.run()
    assert "step-6 is damaged" in caplog.text
    assert losses(run) == losses(finished)
    assert_same_state(run, finished)


# Optimisers across a stop


def test_a_run_stopped_within_an_epoch_goes_on_with_the_rates_and_losses_of_one_never_stopped(pairs_dataset, tmp_path):
    tree = {
        "objective": {"name": "fastclip_v3", "tau": 0.031, "eta": 1e-3},
        "optimizer": {"name": "lamb", "lr": 1e-2, "lr_min": 1e-6, "warmup_epochs": 1},
        "checkpoint": {"every_steps": 4},
    }
    config, broken = small(pairs_dataset, **tree), RunDirectory(tmp_path / "broken")
    whole = train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt), Trainer.open(config, broken) as trainer:
        trainer.run(stop_at(10))
    with Trainer.open(config, broken, resume=True) as trainer:
        assert trainer.steps_done == 8
        trainer.run()
    first, second = (
        [(line["learning_rate"], line["loss"], line.get("tau")) for line in lines(run)] for run in (whole, broken)
    )
    assert first == second
    rates = [rate for rate, *_ in first]
    assert rates[6] == max(rates) == config.optimizer.lr
    assert rates == sorted(rates[:7]) + sorted(rates[7:], reverse=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda training: training.pop("optimizer"), "'optimizer'"),
        (
            lambda training: training["optimizer"].update(name="sgd"),
            "its optimiser is sgd .* but the settings have adamw",
        ),
        (lambda training: training.update(optimizer=training["optimizer"]["weights"]), "of an older format"),
        (lambda training: training["encoders"].popitem(), "Missing key"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_with_its_name(finished, tmp_path, change, reason):
    run = RunDirectory(shutil.copytree(finished.path, tmp_path / "run"))
    info, training = load_checkpoint(latest_checkpoint(run.checkpoints))
    change(training)
    save_checkpoint(run.checkpoints, info, training)
    with pytest.raises(RunError, match=rf"step-14 does not match the run's settings \(.*{reason}.*\).*resume it with"):
        Trainer.open(run.config(), run, resume=True)


# Checkpoints that go, and checkpoints that cannot come


def checkpoints(run):
    return {int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")}


def snapshots(run):
    return {snapshot.step for snapshot in list_snapshots(run.state)}


def snapshot_of_the_latest(run):
    info, _ = load_checkpoint(latest_checkpoint(run.checkpoints))
    return info.snapshot


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({"keep_last": 1}, {14}),
        ({"keep_last": 1, "keep_every": 6}, {6, 12, 14}),
        ({"keep_last": 9}, {3, 6, 9, 12, 14}),
    ],
)
def test_the_checkpoints_and_the_snapshots_that_are_kept_are_of_the_same_steps(pairs_dataset, tmp_path, keep, kept):
    config, run = small(pairs_dataset, checkpoint={"every_steps": 3, **keep}), RunDirectory(tmp_path / "run")

    def latest_is_whole(report):
        if report.step > 3:
            trainer.checkpointer.finish()
            assert snapshot_of_the_latest(run) in {snapshot.id for snapshot in list_snapshots(run.state)}

    with Trainer.open(config, run) as trainer:
        trainer.run(latest_is_whole)
    assert checkpoints(run) == kept
    assert snapshots(run) == kept | {0}


def test_checkpoints_that_a_run_went_back_behind_do_not_crowd_out_the_new_one(pairs_dataset, tmp_path):
    config, run = small(pairs_dataset, checkpoint={"every_steps": 3, "keep_last": 9}), RunDirectory(tmp_path / "run")
    with Trainer.open(config, run) as trainer:
        trainer.run()
    for step in (9, 12, 14):
        shutil.rmtree(run.checkpoints / f"step-{step}")
    config = small(pairs_dataset, checkpoint={"every_steps": 3, "keep_last": 1})

    def stop(report):
        trainer.checkpointer.finish()
        stop_at(11)(report)

    with pytest.raises(KeyboardInterrupt), Trainer.open(config, run, resume=True) as trainer:
        trainer.run(stop)
    assert latest_checkpoint(run.checkpoints).name == "step-9"
    assert checkpoints(run) == {9}
    assert snapshots(run) == {0, 9}


def test_a_damaged_snapshot_kept_for_its_step_is_told_of_until_a_resume_forgets_it_and_its_weights_stay(
    pairs_dataset, tmp_path, caplog
):
    keep = {"every_steps": 3, "keep_last": 1, "keep_every": 6}
    config, run = small(pairs_dataset, checkpoint=keep), RunDirectory(tmp_path / "run")

    def damage(report):
        trainer.checkpointer.finish()
        if report.step == 10:
            info, _ = load_checkpoint(run.checkpoints / "step-6")
            (run.state / "snapshots" / info.snapshot).unlink()
        stop_at(13)(report)

    with pytest.raises(KeyboardInterrupt), Trainer.open(config, run) as trainer:
        trainer.run(damage)
    assert caplog.messages
    for warning in caplog.messages:
        assert "not all old snapshots were deleted" in warning
        assert "restore the file from a copy" in warning
    assert snapshots(run) == {0, 9, 12}
    caplog.clear()
    with Trainer.open(config, run, resume=True) as trainer:
        trainer.run()
    [warning] = [record.getMessage() for record in caplog.records]
    assert "snapshot step-6 is damaged" in warning
    assert checkpoints(run) == {6, 12, 14}
    assert snapshots(run) == {0, 12, 14}


def block(run):
    """Let no snapshot be written: it finds a file where its chunks belong."""
    (run.state / "chunks").mkdir(exist_ok=True)
    (run.state / "chunks").rename(run.state / "chunks-away")
    (run.state / "chunks").touch()


def unblock(run):
    (run.state / "chunks").unlink()
    (run.state / "chunks-away").rename(run.state / "chunks")


def test_a_snapshot_that_fails_is_tried_again_and_training_goes_on(
    finished, pairs_dataset, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(checkpointer, "RETRY_SECONDS", 0.0)
    config, run = small(pairs_dataset, checkpoint={"every_steps": 3, "keep_last": 9}), RunDirectory(tmp_path / "run")

    def report(report):
        if report.step in (6, 7, 9):
            trainer.checkpointer.finish()
        if report.step == 6:
            block(run)
        if report.step == 9:
            assert latest_checkpoint(run.checkpoints).name == "step-3"
            unblock(run)

    with Trainer.open(config, run) as trainer:
        trainer.run(report)
    warned = [record.message for record in caplog.records if record.name == checkpointer.__name__]
    assert [message.split(" was")[0] for message in warned] == ["the checkpoint of step 6", "the checkpoint of step 8"]
    assert checkpoints(run) == {3, 9, 12, 14}
    assert losses(run) == losses(finished)
    assert_same_state(run, finished)


def test_a_failed_attempt_is_not_repeated_at_every_step(pairs_dataset, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpointer, "RETRY_SECONDS", 1e9)
    config, run = small(pairs_dataset, epochs=1, checkpoint={"every_steps": 2}), RunDirectory(tmp_path / "run")

    def report(report):
        if report.step == 2:
            block(run)
        if report.step == 3:
            trainer.checkpointer.finish()
        if report.step == 6:
            unblock(run)

    with Trainer.open(config, run) as trainer:
        trainer.run(report)
    assert [record.name for record in caplog.records].count(checkpointer.__name__) == 1
    assert checkpoints(run) == {7}


def test_a_run_fails_whose_last_checkpoint_cannot_be_written_and_can_be_resumed(finished, pairs_dataset, tmp_path):
    config, run = small(pairs_dataset, checkpoint={"every_steps": 5}), RunDirectory(tmp_path / "run")

    def report(report):
        if report.step == 14:
            trainer.checkpointer.finish()
            block(run)

    with pytest.raises(SnapshotError, match="snapshot of step 14"), Trainer.open(config, run) as trainer:
        trainer.run(report)
    unblock(run)
    with Trainer.open(config, run, resume=True) as trainer:
        assert trainer.steps_done == 10
        trainer.run()
    assert losses(run) == losses(finished)
    assert_same_state(run, finished)


def test_a_model_part_that_fails_leaves_the_last_checkpoint_with_its_snapshot(
    pairs_dataset, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(checkpointer, "RETRY_SECONDS", 0.0)
    config, run = small(pairs_dataset, checkpoint={"every_steps": 3, "keep_last": 2}), RunDirectory(tmp_path / "run")

    def report(report):
        if report.step in (6, 7):
            trainer.checkpointer.finish()
        if report.step == 6:
            (run.checkpoints / ".step-6.partial").touch()  # a file where its directory belongs
        if report.step == 7:
            assert latest_checkpoint(run.checkpoints).name == "step-3"
            assert snapshot_of_the_latest(run) in {snapshot.id for snapshot in list_snapshots(run.state)}

    with Trainer.open(config, run) as trainer:
        trainer.run(report)
    assert "the checkpoint of step 6 was not written" in caplog.text
    assert checkpoints(run) == {12, 14}
    assert snapshots(run) == {0, 12, 14}


def test_a_run_that_another_process_has_just_saved_is_not_taken_back(finished, tmp_path, monkeypatch):
    run = RunDirectory(shutil.copytree(finished.path, tmp_path / "run"))
    create_order = loop.create_order

    def meanwhile(*arguments):
        (run.checkpoints / "step-15").mkdir()
        return create_order(*arguments)

    monkeypatch.setattr(loop, "create_order", meanwhile)
    with pytest.raises(RunError, match="another process has just written a checkpoint"):
        Trainer.open(run.config(), run, resume=True)
    assert 14 in snapshots(run)


# Kills


KILLED = (
    "batch_size=128", "log_every=1", "data.image_size=32", "checkpoint.every_steps=7",
    "canonical_shards=2", "blocks_per_shard=15", "window_blocks=4",
)  # fmt: skip


@pytest.fixture
def start(start_program, pairs_dataset):
    """Return a function that starts or resumes a run, 15 steps an epoch, in a process of its own."""

    def start(run, epochs, budget="none"):
        all_settings = (*KILLED, f"epochs={epochs}", f"state.memory_budget={budget}")
        settings = [part for setting in all_settings for part in ("--set", setting)]
        return start_program("train", "--data", pairs_dataset.path, "--out", run.path, "--resume", *settings)

    return start


def finish(program):
    code, _, errors = program.end()
    assert code == 0, errors


def kill_once_it_has_made(program, run, steps):
    while len(run.metrics_file.read_text().splitlines()) < steps if run.metrics_file.exists() else True:
        assert program.is_running(), program.end()
        time.sleep(0.01)
    program.kill()
    program.end()


@pytest.mark.parametrize(("kills", "epochs"), [(1, 4), pytest.param(100, 20, marks=pytest.mark.soak)])
def test_a_run_killed_and_resumed_with_all_or_few_rows_in_memory_has_the_losses_of_one_never_killed(
    start, tmp_path, kills, epochs
):
    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    finish(start(whole, epochs))
    steps = len(losses(whole))
    assert steps == 15 * epochs
    budgets = cycle(["40KB", "none"])
    for target in sorted(random.Random(kills).sample(range(2, steps), kills)):
        kill_once_it_has_made(start(broken, epochs, next(budgets)), broken, target)
    finish(start(broken, epochs, next(budgets)))
    assert [line["step"] for line in lines(broken)] == list(range(1, steps + 1))
    assert losses(broken) == losses(whole)
    assert_same_state(broken, whole)
