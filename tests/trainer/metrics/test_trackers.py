"""What TensorBoard, W&B and trackers of a user's own get of a run, and what they cost it: nothing."""

import json
import logging
import struct
import sys
import threading
import time
from contextlib import closing

import numpy as np
import pandas as pd
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from thermopile.state_store.reader import StateReader
from thermopile.trainer.config import load_config
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.metrics import trackers
from thermopile.trainer.metrics.metrics_file import numbers_in
from thermopile.trainer.metrics.trackers import TensorBoard, makers_of, summary
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets
from support.own_trackers import Hanging, sent
from support.runs import OFTEN, SMALL, finish, lines, small, stop_at, stopped, train
from support.written_runs import write_run

RECORDER, FAILING, HANGING = (f"support.own_trackers:{name}" for name in ("Recorder", "Failing", "Hanging"))


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture(scope="module")
def recorded(pairs_dataset, tmp_path_factory):
    """14 steps, stopped after 11 and resumed after 10; and the lines before. Each step waits for the tracker."""
    config, path = small(pairs_dataset, **OFTEN, trackers=[RECORDER]), tmp_path_factory.mktemp("recorded") / "run"

    def stop_once_sent(report):
        while report.step not in {line["step"] for line in sent(RunDirectory(path))[1]}:
            time.sleep(0.01)
        stop_at(11)(report)

    with pytest.raises(KeyboardInterrupt):
        train(config, path, on_report=stop_once_sent)
    before = {line["step"]: line for line in lines(RunDirectory(path))}
    return train(config, path, resume=True), before


def test_a_tracker_gets_the_numbers_of_every_line_once_also_of_steps_that_are_made_again(recorded):
    run, before = recorded
    steps = [line for line in sent(run)[1] if "loss" in line]
    expected = {line["step"]: line for line in lines(run)} | before
    assert [line["step"] for line in steps] == list(range(1, 15))
    for line in steps:
        assert dict(numbers_in(expected[line["step"]])).items() <= line.items()


def test_a_resumed_run_keeps_its_id_and_the_tracker_gets_its_settings(recorded):
    run, _ = recorded
    first, second = sent(run)[0]
    assert first == second == run.trackers_id.read_bytes().decode().split()[0]
    (file,) = run.path.glob("sent-*.jsonl")
    settings = json.loads(file.read_text().splitlines()[0])["settings"]
    assert (settings["epochs"], settings["objective.name"], settings["model.dim"]) == (2, "isogclr", 16)
    train(run.config(), run, resume=True)
    assert len(sent(run)[0]) == 2  # a finished run makes none


def test_a_tracker_gets_the_temperatures_once_an_epoch_and_at_each_end(recorded):
    run, _ = recorded
    with_temperatures = [line for line in sent(run)[1] if "histograms" in line]
    assert [line["step"] for line in with_temperatures] == [8, 11, 14]  # the second epoch's first; two ends
    assert with_temperatures[2].keys() == {"step", "histograms"} | {
        f"{side}/tau_of_classes/16" for side in ("image", "text")
    }


def test_a_summary_has_the_visited_samples_and_the_mean_over_the_classes_of_each_size(pairs_dataset, tmp_path):
    random = np.random.default_rng(0)
    taus = {side: random.uniform(0.02, 0.2, pairs_dataset.n).astype(np.float32) for side in ("image", "text")}
    visited = random.random(pairs_dataset.n) < np.arange(pairs_dataset.n) / pairs_dataset.n
    run = write_run(tmp_path / "run", pairs_dataset, taus, visited=visited)
    found = summary(StateReader.open(run.state), pairs_dataset)
    samples = pd.DataFrame({"group": pairs_dataset.column("group").to_pylist(), **taus})[visited]
    for side in taus:
        counts, edges = found["histograms"][f"{side}/tau"]
        assert counts.tolist() == np.histogram(taus[side][visited], edges)[0].tolist()
        assert (counts.sum(), counts[0] > 0, counts[-1] > 0) == (visited.sum(), True, True)
        classes = samples.groupby("group")[side].agg(["size", "mean"])
        numbers = {name: value for name, value in found.items() if name.startswith(f"{side}/")}
        assert numbers == {
            f"{side}/tau_of_classes/{size}": pytest.approx(of_size["mean"].mean())
            for size in (1, 2, 4, 8, 16)
            if len(of_size := classes[(classes["size"] >= size) & (classes["size"] < 2 * size)])
        }
        assert len(numbers) >= 2


def test_a_tracker_that_fails_is_dropped_with_one_warning_and_the_others_go_on(pairs_dataset, tmp_path, caplog):
    run = train(small(pairs_dataset, epochs=1, trackers=[FAILING, RECORDER]), tmp_path / "run")
    (warning,) = warnings_of(caplog)
    assert f"the tracker {FAILING} failed and gets no more lines" in warning
    assert "SystemExit('no room for step 1')" in warning
    assert [line["step"] for line in lines(run)] == list(range(1, 8))
    assert [line["step"] for line in sent(run)[1] if "loss" in line] == list(range(1, 8))


def test_a_tracker_that_hangs_costs_no_step_and_what_does_not_fit_is_left_out_with_one_warning(
    pairs_dataset, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(trackers, "QUEUE", 3)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(Hanging, "answers", threading.Event())
    before = set(threading.enumerate())
    run = train(small(pairs_dataset, trackers=[HANGING]), tmp_path / "run")
    assert not Hanging.answers.is_set()  # all that time
    assert [line["step"] for line in lines(run)] == list(range(1, 15))
    left_out, not_done = warnings_of(caplog)
    assert "3 lines wait, so some are left out" in left_out
    assert "not done after 0 s" in not_done
    Hanging.answers.set()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "thermopile-trackers":
            thread.join(60)
            assert not thread.is_alive()


def test_an_error_waits_only_briefly_for_a_tracker(pairs_dataset, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "FAILED_SECONDS", 0.05)
    monkeypatch.setattr(Hanging, "answers", threading.Event())
    with pytest.raises(KeyboardInterrupt):
        train(small(pairs_dataset, trackers=[HANGING]), tmp_path / "run", on_report=stop_at(1))
    Hanging.answers.set()
    assert "not done after 0 s" in warnings_of(caplog)[0]


@pytest.mark.wide
def test_the_first_rank_alone_sends(start_ranks, pairs_dataset, tmp_path):
    settings = sets(*SMALL, f'trackers=["{RECORDER}"]')
    run = RunDirectory(tmp_path / "run")
    finish(start_ranks(2, "train", "--data", pairs_dataset.path, "--out", run.path, "--resume", *settings))
    assert [line["step"] for line in sent(run)[1] if "loss" in line] == list(range(1, 15))  # fails for two files


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_without_its_package_a_tracker_is_refused_with_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"{name} needs its package: pip install 'thermopile\[{name}\]'"):
        makers_of([name])


def test_an_unknown_tracker_is_refused_before_anything_is_written(pairs_dataset, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"trackers\.0 = 'wadnb': should be tensorboard, wandb or module:name \(did you mean 'wandb'\?\)",
    ):
        load_config({"trackers": ["wadnb"]})
    with pytest.raises(ConfigError, match="'nowhere:Tracker' cannot be imported"):
        train(small(pairs_dataset, trackers=["nowhere:Tracker"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_only_a_file_of_settings_names_is_not_imported(pairs_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("thermopile.trainer.plugins.import_module", lambda name: pytest.fail(f"imported {name}"))
    file = tmp_path / "sent.toml"
    file.write_text('trackers = ["wandb", "sent:One", "sent:Other"]\n')
    done = cli("train", "--data", pairs_dataset.path, "--out", tmp_path / "run", "--config", file)
    assert_one_line(done, 2, f"--config {file} sets trackers = 'sent:One sent:Other'", "add --allow-code")


# TensorBoard


def board(path):
    events = EventAccumulator(str(path), size_guidance={"histograms": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }, events


def test_tensorboard_has_every_number_at_its_step_the_histograms_and_the_settings(tmp_path):
    with closing(TensorBoard(tmp_path, {"epochs": 3}, "id")) as log:
        log.add({"step": 1, "loss": 0.5})
        log.add({"step": 2, "loss": 0.25, "histograms": {"image/tau": (np.array([3, 1]), np.array([0.1, 0.2, 0.4]))}})
        log.add({"step": 2, "evaluation/knn/10": 0.75})
    scalars, events = board(tmp_path / "tensorboard")
    assert scalars == {"loss": [(1, 0.5), (2, 0.25)], "evaluation/knn/10": [(2, 0.75)]}
    (drawn,) = events.Histograms("image/tau")
    assert (drawn.step, drawn.histogram_value.num, drawn.histogram_value.bucket) == (2, 4, [3, 1])
    assert drawn.histogram_value.sum == pytest.approx(3 * 0.15 + 0.3)
    assert b"epochs = 3" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def test_in_tensorboard_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path):
    for keep_steps, loss in ((0, 1.0), (3, 2.0)):
        with closing(TensorBoard(tmp_path, {}, "id", keep_steps=keep_steps)) as log:
            for step in range(keep_steps + 1, keep_steps + 6):
                log.add({"step": step, "loss": loss})
    assert board(tmp_path / "tensorboard")[0]["loss"] == [(step, 1.0 if step < 4 else 2.0) for step in range(1, 9)]


def test_a_resumed_run_of_an_earlier_version_continues_its_tensorboard(pairs_dataset, tmp_path):
    config = small(pairs_dataset, epochs=1, **OFTEN, trackers=["tensorboard"])
    run = stopped(config, tmp_path / "run", 5)
    run.trackers_id.unlink()
    run = train(config, run, resume=True)
    assert [step for step, _ in board(run.tensorboard)[0]["loss"]] == list(range(1, 8))


# W&B


def history(file):
    """The steps and numbers in an offline run: protocol buffers in LevelDB's log format, after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, record, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
        size, kind = struct.unpack_from("<HB", data, place + 4)
        record = (b"" if kind in (1, 2) else record) + data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4) and (of := Record.FromString(record)).WhichOneof("record_type") == "history":
            found.append({"/".join(item.nested_key): json.loads(item.value_json) for item in of.history.item})
    return found


@pytest.mark.wide
def test_a_resumed_run_has_the_same_wandb_id_and_sends_each_step_once(start_program, pairs_dataset, tmp_path):
    pytest.importorskip("wandb")
    run = RunDirectory(tmp_path / "run")
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": tmp_path, "HOME": tmp_path}
    settings = sets(*SMALL, "trackers=['wandb']", "checkpoint.every_steps=5")
    for steps in (9, 14):
        command = ("train", "--data", pairs_dataset.path, "--out", run.path, "--resume", *settings)
        finish([start_program(*command, *sets(f"steps={steps}"), "--allow-change", "steps", **offline)])
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    run_id = run.trackers_id.read_bytes().decode().split()[0]
    assert [folder.name.rpartition("-")[2] for folder in folders] == [run_id] * 2
    sent_lines = [line for folder in folders for line in history(folder / f"run-{run_id}.wandb")]
    assert [line["_step"] for line in sent_lines] == list(range(1, 15))
    assert [line["loss"] for line in sent_lines] == [line["loss"] for line in lines(run)]
    assert sum(sent_lines[-1]["image/tau/values"]) == (StateReader.open(run.state).column("visits") > 0).sum()
