"""`thermopile status`: what it tells of a run that trains, stands, hangs or ended, and that it leaves no trace."""

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

from thermopile.storage.local import LocalPath
from thermopile.storage.lock import FileLock
from thermopile.storage.sealed_json import seal_line
from thermopile.storage.selection import WITHOUT, SelectionWriter
from thermopile.trainer.metrics import metrics_file

from support.cli import answer, cli, succeed
from support.written_runs import write_run

HOLD = """
import sys, time
from pathlib import Path
from thermopile.storage.lock import FileLock
lock = FileLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(100)
"""
TOTAL = 80
"""66 samples in batches of 16 make 4 steps an epoch, and 20 epochs."""


def status_of(run):
    return answer("status", run.path)


def text_of(run):
    return succeed("status", run.path).stdout


@contextmanager
def held(run):
    """As by a process that trains."""
    lock = FileLock(run.state_lock)
    try:
        yield
    finally:
        lock.release()


def line(step, **more):
    times = {"step_seconds": 0.5, "data_wait_seconds": 0.1, "store_wait_seconds": 0.0, "forward_backward_seconds": 0.35}
    values = {"step": step, "epoch": (step - 1) // 4, "loss": 8.0 / step, "learning_rate": 1e-3, "refused_rows": 0}
    return values | {"image/tau_mean": 0.1, "text/tau_mean": 0.2} | times | more


def write_lines(run_directory, lines):
    run_directory.metrics_file.write_bytes(b"".join(seal_line(line) + b"\n" for line in lines))


def write_checkpoint(run_directory, step, size=1000):
    path = run_directory.checkpoints / f"step-{step}"
    path.mkdir(parents=True)
    (path / "tensors.safetensors").write_bytes(bytes(size))


@pytest.fixture(scope="session")
def fresh(hostile_dataset, tau_by_class_size, tmp_path_factory):
    """A run of 66 samples with one snapshot; copied by `made` before it is changed."""
    taus = {"image": tau_by_class_size, "text": tau_by_class_size}
    return write_run(tmp_path_factory.mktemp("status") / "run", hostile_dataset, taus)


@pytest.fixture
def made(fresh, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(fresh.path, path)
    return type(fresh)(path)


def test_a_run_that_trains_shows_its_place_its_loss_its_speed_and_the_time_left(made):
    write_lines(made, [line(step) for step in range(1, 21)])
    with held(made):
        found = status_of(made)
        words = text_of(made)
    assert (found["state"], found["writer"].split()[:2]) == ("running", ["pid", str(os.getpid())])
    assert (found["total_steps"], found["steps"]["step"], found["steps"]["epoch"]) == (TOTAL, 20, 4)
    assert found["steps"]["loss"] == 0.4
    assert found["steps"]["loss_mean"] == pytest.approx(sum(8 / step for step in range(1, 21)) / 20)
    assert found["steps"]["tau_mean"] == pytest.approx(0.15)
    assert found["samples_per_second"] == 32.0
    assert found["seconds_left"] == 30.0
    for part in ("step           20 of 80 (25.0%), epoch 5 of 20, 30 s left", "32 samples/s", "loss           0.4000",
                 f"running as pid {os.getpid()} on", "█▄▃", "data wait 20%  store wait 0%  forward backward 70%",
                 ):  # fmt: skip
        assert part in words
    assert "hint           data wait 20%: " in words


def test_means_are_over_the_last_hundred_steps(made):
    write_lines(made, [line(step, loss=100.0 if step <= 50 else 1.0) for step in range(1, 151)])
    assert status_of(made)["steps"]["loss_mean"] == 1.0


def test_a_process_that_writes_nothing_for_long_is_silent(made):
    write_lines(made, [line(1)])
    with held(made):
        hour_ago = time.time() - 3600
        os.utime(made.metrics_file, (hour_ago, hour_ago))
        assert status_of(made)["state"] == "running"  # it has just begun, and may be reading its rows
        os.utime(made.path / "state.lock", (hour_ago, hour_ago))
        assert status_of(made)["state"] == "silent"
        assert "holds the run lock but has been quiet for 1 h" in text_of(made)
        write_lines(made, [line(1, step_seconds=100.0)])  # ten of them between two writings
        os.utime(made.metrics_file, (hour_ago, hour_ago))
        assert status_of(made)["state"] == "running"


def test_a_stopped_run_differs_from_a_killed_one(made):
    write_lines(made, [line(1)])
    assert (status_of(made)["state"], status_of(made)["writer"]) == ("stopped", None)
    (made.path / "state.lock").write_text("pid 1 on elsewhere\n")
    assert (status_of(made)["state"], status_of(made)["writer"]) == ("stopped", "pid 1 on elsewhere")
    assert "pid 1 on elsewhere was killed, or trains on a machine that does not share its lock" in text_of(made)
    assert status_of(made)["seconds_left"] is None


def test_a_run_whose_process_was_killed_on_this_machine_says_so_at_once(made):
    write_lines(made, [line(1)])
    with subprocess.Popen([sys.executable, "-c", HOLD, made.state_lock], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline()
        assert status_of(made)["state"] == "running"
        holder.kill()
    assert status_of(made)["state"] == "stopped"
    assert f"stopped: pid {holder.pid} on {socket.gethostname()} was killed (last line" in text_of(made)


def test_a_run_is_finished_once_its_last_step_is_saved(made):
    write_lines(made, [line(step) for step in range(1, TOTAL + 1)])
    write_checkpoint(made, 40)
    assert status_of(made)["state"] == "stopped"
    write_checkpoint(made, TOTAL)
    assert status_of(made)["state"] == "finished"


def test_a_run_that_ended_at_the_step_asked_for_says_so(made):
    made.record(made.config().model_copy(update={"steps": 6}))
    write_lines(made, [line(step) for step in range(1, 7)])
    assert "6 of 6 (100.0%), epoch 2 of 20" in text_of(made)
    write_checkpoint(made, 6)
    assert "6 of 6 (100.0%), ended by --steps, epoch 2 of 20" in text_of(made)


def test_a_run_that_never_made_a_step_has_none_to_show(hostile_dataset, tmp_path):
    never = write_run(tmp_path / "never", hostile_dataset, {}, snapshot=False)
    found = status_of(never)
    assert (found["state"], found["steps"], found["sample_state"], found["notes"]) == ("never started", None, None, [])
    assert "none yet" in text_of(never)


def test_what_is_saved_is_listed(made):
    write_lines(made, [line(9)])
    for step in (4, 12, 8):
        write_checkpoint(made, step, size=step * 1000)
    (made.checkpoints / ".step-16.partial").mkdir()
    (made.checkpoints / "step-x").mkdir()
    (made.checkpoints / "step-99").write_text("no directory")
    found = status_of(made)
    assert [(saved["step"], saved["bytes"]) for saved in found["checkpoints"]] == [(4, 4000), (8, 8000), (12, 12000)]
    assert found["sample_state"] == {
        "samples": 66, "kept": 66, "dataset_samples": 66, "snapshots": ["step-0", "step-5"], "coverage": 1.0,
        "is_estimated": False, "parts": {},
    }  # fmt: skip
    words = text_of(made)
    assert "step 12, 0 s ago, 12.0 kB; kept: 4, 8, 12" in words
    assert "visited 100%" in words


def test_coverage_is_the_share_of_samples_visited(hostile_dataset, tau_by_class_size, tmp_path):
    visited = [sample_id % 3 == 0 for sample_id in range(hostile_dataset.n)]
    taus = {"image": tau_by_class_size, "text": tau_by_class_size}
    part = write_run(tmp_path / "part", hostile_dataset, taus, visited=visited)
    assert status_of(part)["sample_state"]["coverage"] == pytest.approx(22 / 66)
    with SelectionWriter(LocalPath(part.selection), hostile_dataset.n) as writer:
        writer.add(WITHOUT, [np.arange(0, 33)])  # of which 11 were visited before
        writer.finish()
    found = status_of(part)
    assert (found["sample_state"]["coverage"], found["total_steps"]) == (pytest.approx(11 / 33), TOTAL)


def test_coverage_by_some_blocks_is_said_to_be_about_so_much(made, monkeypatch):
    assert "visited 100% at the last snapshot" in text_of(made)
    monkeypatch.setattr("thermopile.trainer.run.run_status.COVERAGE_BLOCKS", 1)
    assert "visited about 100% at the last snapshot" in text_of(made)


def test_lines_without_loss_or_times_are_no_obstacle(made):
    old = {"step": 1, "epoch": 0, "loss": 2.0, "data_wait_seconds": 0.1}
    skipped = {"step": 2, "epoch": 0, "loss": None, "skipped": True}
    evaluation = {"step": 2, "evaluation": {"knn": {"10": {"all": 0.5}}}}
    write_lines(made, [old, skipped, evaluation])
    with made.metrics_file.open("a") as file:
        file.write('{"step": 3, "loss": 9')  # being written
    found = status_of(made)
    assert (found["steps"]["step"], found["steps"]["loss"], found["steps"]["loss_mean"]) == (2, None, 2.0)
    assert (found["steps"]["skipped"], found["steps"]["split"], found["samples_per_second"]) == (1, {}, None)
    assert found["evaluations"] == [{"step": 2, "evaluation": {"knn/10/all": 0.5}}]
    words = text_of(made)
    assert "step 2: knn/10 0.5" in words
    assert "1 of the last 100 steps" in words
    assert "the step was skipped" in words


def test_lines_that_are_not_what_was_written_are_left_out_and_noted(made):
    write_lines(made, [line(1), line(2)])
    with made.metrics_file.open("ab") as file:
        file.write(seal_line(line(3)).replace(b'"step": 3', b'"step": 9') + b"\n")
    found = status_of(made)
    assert found["steps"]["step"] == 2
    assert any(f"1 of the last lines of {made.metrics_file} cannot be read" in note for note in found["notes"])


@pytest.mark.parametrize("odd", [None, True, "x", [1], {"a": 1}, -1.7e308, 1.7e308, 1e-320, "\ud800"])
def test_odd_values_in_lines_whose_checksum_is_right_are_no_obstacle(made, odd):
    names = set(line(1)) | {"skipped", "image/share_silent", "write_backlog_seconds", "weights"}
    for name in sorted(names - {"step"}):
        write_lines(made, [line(9), *(line(step, **{name: odd}) for step in range(10, 14))])
        assert status_of(made)["steps"]["step"] == 13
    steps = [line(9), *(line(step, loss=odd, step_seconds=odd) for step in (10, 11)), line(12) | {"step": odd}]
    write_lines(made, [*steps, {"step": 9, "evaluation": {"knn": {"10": odd}}, "weights": odd}])
    assert status_of(made)["evaluations"][0]["step"] == 9
    assert "step 9:" in text_of(made)


def test_megabytes_of_empty_lines_are_not_all_read_as_lines(made, monkeypatch):
    parsed, parse = [], metrics_file._parsed
    monkeypatch.setattr(metrics_file, "_parsed", lambda text: parsed.append(1) or parse(text))
    write_lines(made, [line(1)])
    with made.metrics_file.open("ab") as file:
        file.write(b"\n" * (64 << 20))
    assert any("cannot be read" in note for note in status_of(made)["notes"])
    assert len(parsed) < 2 << 20


def test_the_last_warnings_are_shown_and_nothing_hostile_reaches_the_terminal(made):
    warnings = [f"2026-01-01 00:00:0{i}+0000 warning {i}" for i in range(7)]
    (made.path / "warnings.log").write_bytes("\n".join([*warnings, "\x1b[2J evil \u202e"]).encode() + b"\xff\n")
    (made.path / "state.lock").write_text("\x1b]0;pid 1\n")
    write_lines(made, [line(1), {"step": 1, "evaluation": {"\x1b[31mred": {"all": 1.0}}}])
    found, words = status_of(made), text_of(made)
    assert len(found["warnings"]) == 5
    assert found["warnings"][0] == warnings[3]
    assert "warning 6" in words
    assert "\x1b" not in words
    assert "\u202e" not in words
    assert "[U+001B]" in words


def test_a_damaged_state_is_a_note_and_the_rest_is_shown(made):
    write_lines(made, [line(1)])
    for file in (made.state / "snapshots").iterdir():
        file.write_bytes(b"damaged")
    found = status_of(made)
    assert (found["sample_state"], found["total_steps"], found["steps"]["step"]) == (None, None, 1)
    assert any("cannot be read" in note for note in found["notes"])
    assert "note " in text_of(made)


def test_status_changes_nothing(made):
    write_lines(made, [line(1)])
    (made.path / "state.lock").write_text("pid 1 on elsewhere\n")
    before = {path: path.stat().st_mtime_ns for path in made.path.rglob("*")}
    assert cli("status", made.path).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in made.path.rglob("*")} == before


def test_a_writer_may_start_while_status_reads_the_run(made):
    (made.path / "state.lock").write_text("pid 1 on elsewhere\n")
    status_of(made)
    FileLock(made.state_lock).release()  # would raise LockedError
