"""A run: a line for every step, the same losses for the same seed, and errors that say which step."""

from dataclasses import replace

import numpy as np
import pytest

from thermopile.state_store.reader import StateReader
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint
from thermopile.trainer.config import to_toml
from thermopile.trainer.errors import ConfigError, TrainingError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory

from support.runs import lines, losses, small, train


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
    assert (state.column("text/tau")[~seen] == np.float32(0.05)).all()


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
    config = small(pairs_dataset, epochs=6, objective={"name": "clip"}, optimizer={"warmup": 5})
    run = train(config, tmp_path / "run")
    values = list(losses(run).values())
    assert np.mean(values[-7:]) < np.mean(values[:7]) - 0.3
    _, training = load_checkpoint(latest_checkpoint(run.checkpoints))
    assert training["objective"]["log_logit_scale"] != pytest.approx(np.log(1 / 0.07))


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_samples(pairs_dataset, tmp_path, monkeypatch):
    config, run = small(pairs_dataset, log_every=4, checkpoint={"every_steps": 3}), RunDirectory(tmp_path / "run")
    with Trainer.open(config, run) as trainer:
        outcome = trainer._outcome

        def poisoned(*inputs):
            found = outcome(*inputs)
            return replace(found, loss=found.loss * np.nan) if trainer.run.steps_done == 6 else found

        monkeypatch.setattr(trainer, "_outcome", poisoned)
        ids = ", ".join(map(str, trainer.run.order.batch_ids(0, 6)[:8]))
        with pytest.raises(
            TrainingError, match=rf"the loss of step 7 is nan\. The ids of its 256 samples begin with {ids}: .*step-6,"
        ):
            trainer.train()
    assert {path.name for path in run.checkpoints.glob("step-*")} == {"step-3", "step-6"}
    assert [line["step"] for line in lines(run)] == list(range(1, 7))


def test_features_that_are_not_finite_stop_the_run(pairs_dataset, tmp_path):
    config = small(pairs_dataset, optimizer={"lr": 1e30, "warmup": 0})
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
    assert (recorded.order.canonical_shards, recorded.order.blocks_per_shard, recorded.order.window_blocks) == (8, 1, 1)
    assert "auto" not in to_toml(recorded).replace('device = "auto"', "")


def test_reports_count_the_steps_since_the_last_one(pairs_dataset, tmp_path):
    config, run = small(pairs_dataset, log_every=5, checkpoint={"every_steps": 3}), RunDirectory(tmp_path / "run")
    reports = []
    with Trainer.open(config, run) as trainer:
        trainer.train(reports.append)
    assert [report.step for report in reports] == [3, 5, 6, 9, 10, 12, 14]
    assert all(report.samples_per_second > 0 for report in reports)
    assert all(0 < sum(report.split.values()) - report.split["write_backlog"] <= 1.01 for report in reports)


@pytest.mark.parametrize("ahead", [1, 5])
def test_rows_of_each_step_are_prefetched_once_in_time_also_across_epochs(pairs_dataset, tmp_path, monkeypatch, ahead):
    config = small(pairs_dataset, state={"prefetch_steps": ahead})
    seen = []

    def recorded(name, real):
        def call(ids):
            seen.append((name, step_of[np.asarray(ids).tobytes()]))
            return real(ids)

        return call

    with Trainer.open(config, RunDirectory(tmp_path / "run")) as trainer:
        step_of = {trainer.run.order.batch_ids(*divmod(step, 7)).tobytes(): step for step in range(14)}
        monkeypatch.setattr(trainer.run.store, "prefetch", recorded("prefetch", trainer.run.store.prefetch))
        monkeypatch.setattr(trainer.run.store, "take", recorded("take", trainer.run.store.take))
        trainer.train()
    assert [step for name, step in seen if name == "take"] == list(range(14))
    assert [step for name, step in seen if name == "prefetch"] == list(range(1, 14))
    for step in range(14):
        before_the_next = seen[: seen.index(("take", step + 1))] if step < 13 else seen
        assert max(before_the_next, key=lambda event: event[1])[1] == min(step + ahead, 13)
