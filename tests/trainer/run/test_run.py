"""A loop of one's own over a run's parts."""

import shutil

import numpy as np
import pytest
import torch

from thermopile import Run
from thermopile.state_store.reader import StateReader
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint
from thermopile.trainer.config.layers import read_preset
from thermopile.trainer.errors import ConfigError, RunError
from thermopile.trainer.objectives.isogclr import Isogclr
from thermopile.trainer.run_directory import RunDirectory

from support.runs import OWN_CODE, SMALL_MODEL, assert_same_run, lines

SETTINGS = {
    "epochs": 2, "batch_size": 256, "log_every": 5, "data": {"image_size": 16}, "checkpoint": {"every_steps": 4},
    "model": SMALL_MODEL,
}  # fmt: skip


def open_run(path, dataset, **more):
    return Run.from_settings(path, dataset.path, SETTINGS | more)


def train(run, stop_after=None, dropout=0.5):
    """The loop of a user, whose features pass a dropout."""
    optimizer = torch.optim.AdamW(run.encoders.parameters(), lr=1e-3)
    run.attach(optimizer=optimizer)
    for batch in run.batches():
        state = run.take(batch.sample_ids)
        features = run.encoders(batch)
        dropped = torch.nn.functional.dropout(features.first, dropout)
        first = torch.nn.functional.normalize(dropped + 1e-3 * features.first, dim=1)
        outcome = run.objective(first, features.second, state, run.progress)
        run.put(batch.sample_ids, outcome.state)
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        run.end_step(loss=outcome.loss, **outcome.metrics)
        if run.steps_done == stop_after:
            return


@pytest.fixture(scope="module")
def whole(pairs_dataset, tmp_path_factory):
    with open_run(tmp_path_factory.mktemp("own") / "whole", pairs_dataset) as run:
        train(run)
    return run.directory


def test_it_logs_every_step_and_keeps_the_state_of_every_sample(whole, pairs_dataset):
    assert [line["step"] for line in lines(whole)] == list(range(1, 15))
    assert [line["epoch"] for line in lines(whole)] == [0] * 7 + [1] * 7
    assert {"data_wait_seconds", "step_seconds", "image/tau_mean"} <= lines(whole)[0].keys()
    assert StateReader.open(whole.state).column("visits").sum() == 14 * 256
    assert latest_checkpoint(whole.checkpoints).name == "step-14"


def test_stopped_within_an_epoch_it_goes_on_bit_by_bit_with_optimiser_and_dropout(whole, pairs_dataset, tmp_path):
    with open_run(tmp_path / "broken", pairs_dataset) as run:
        train(run, stop_after=10)
    with open_run(tmp_path / "broken", pairs_dataset) as run:
        assert run.steps_done == 8
        train(run)
    assert_same_run(run.directory, whole)


def test_a_start_makes_the_objective_once_and_once_more_for_settings_that_changed(pairs_dataset, tmp_path, monkeypatch):
    made, init = [], Isogclr.__init__
    monkeypatch.setattr(Isogclr, "__init__", lambda self, *given: made.append(init(self, *given)))
    for more, times in (({}, 1), ({}, 1), ({"epochs": 3}, 2)):  # a new run, resumed, with other settings
        made.clear()
        Run.from_settings(tmp_path / "run", pairs_dataset.path, SETTINGS | more, allow_change=["epochs"]).close()
        assert len(made) == times


def test_a_finished_run_yields_no_batch(whole, pairs_dataset):
    with open_run(whole.path, pairs_dataset) as run:
        assert not list(run.batches())


def test_a_part_that_the_checkpoint_does_not_have_is_refused(whole, pairs_dataset):
    with open_run(whole.path, pairs_dataset) as run, pytest.raises(RunError, match=r"does not match .*'schedule'"):
        run.attach(schedule=torch.optim.AdamW(run.encoders.parameters()))


def test_other_settings_or_other_code_than_the_runs_are_refused(whole, pairs_dataset):
    with pytest.raises(ConfigError, match="cannot be resumed with other settings: seed: the run has 0, asked for 1"):
        open_run(whole.path, pairs_dataset, seed=1)
    name = OWN_CODE[-1].partition("=")[2]
    with pytest.raises(ConfigError, match=rf"objective.name: the run has 'isogclr', asked for '{name}'"):
        open_run(whole.path, pairs_dataset, objective={"name": name})


def test_code_that_only_the_runs_files_name_is_not_imported(pairs_dataset, tmp_path, monkeypatch):
    own = {"objective": {"name": OWN_CODE[-1].partition("=")[2]}}
    with open_run(tmp_path / "run", pairs_dataset, **own) as run:
        pass
    monkeypatch.setattr("thermopile.trainer.plugins.import_module", lambda name: pytest.fail(f"imported {name}"))
    with pytest.raises(
        ConfigError, match=r"config.toml sets objective.name = 'support.own_code:Weighted', which imports"
    ):
        open_run(run.directory.path, pairs_dataset)


def test_a_resumed_run_keeps_what_the_settings_leave_out_and_records_what_may_change(whole, pairs_dataset, tmp_path):
    run = RunDirectory(shutil.copytree(whole.path, tmp_path / "run"))
    more = {"epochs": 3, "log_every": 1}
    with pytest.raises(ConfigError, match="epochs: the run has 2, asked for 3"):
        Run.from_settings(run.path, pairs_dataset.path, more)
    with Run.from_settings(run.path, pairs_dataset.path, more, allow_change=["epochs"]) as resumed:
        assert (resumed.config.model, resumed.total_steps) == (whole.config().model, 21)
    assert (run.config().epochs, run.config().log_every) == (3, 1)


def test_a_run_may_start_from_the_weights_of_another(whole, pairs_dataset, tmp_path):
    with open_run(tmp_path / "run", pairs_dataset, init={"run": str(whole.path)}) as run:
        assert run.config.init.run == f"{whole.path}@step-14"
        weights = load_checkpoint(whole.checkpoints / "step-14")[1]["encoders"]
        for name, value in run.encoders.state_dict().items():
            assert torch.equal(value, weights[name])


def test_a_batch_whose_step_was_not_ended_is_told(pairs_dataset, tmp_path):
    with open_run(tmp_path / "run", pairs_dataset) as run, pytest.raises(RuntimeError, match="call end_step once"):
        for _ in run.batches():
            pass


def test_parts_are_attached_before_the_first_step_and_can_be_saved(pairs_dataset, tmp_path):
    class Odd:
        def state_dict(self):
            return {"array": np.zeros(2)}

    with open_run(tmp_path / "run", pairs_dataset) as run:
        with pytest.raises(TypeError):
            run.attach(odd=Odd())
        train(run, stop_after=1)
        with pytest.raises(RunError, match="schedule: attach parts of a run before its first step"):
            run.attach(schedule=torch.optim.AdamW(run.encoders.parameters()))


@pytest.mark.parametrize("more", [{"micro_batch": 32}, {"model": {"ema": 0.9}}])
def test_settings_for_the_trainers_loop_alone_are_refused_before_any_writing(pairs_dataset, tmp_path, more):
    with pytest.raises(ConfigError, match=r"micro_batch and model\.ema are for thermopile's own loop"):
        open_run(tmp_path / "run", pairs_dataset, **more)
    assert not (tmp_path / "run").exists()


def test_a_presets_settings_lie_below_the_given_ones(pairs_dataset, tmp_path):
    with Run.from_settings(tmp_path / "run", pairs_dataset.path, {"epochs": 3}, preset="glyphs") as run:
        assert run.config.epochs == 3
        assert run.config.optimizer.lr == read_preset("glyphs")["optimizer"]["lr"]
