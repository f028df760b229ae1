"""A signal stops a run with a checkpoint; a second one ends it at once; either way it goes on as if never stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from thermopile.trainer.checkpoint import latest_checkpoint, load_checkpoint
from thermopile.trainer.preemption import EXIT_CODE, SIGNALS, StopRequest
from thermopile.trainer.run_directory import RunDirectory

STEPS = 60


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_remembered_by_name_and_told_of_once(number):
    told = []
    with StopRequest(told.append) as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
    assert told == [stop.name] == [number.name]


def test_what_the_signals_did_before_they_do_again():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert [signal.getsignal(number) for number in SIGNALS] == before


WAITING = """
import time
from thermopile.trainer.preemption import StopRequest
with StopRequest(lambda name: print(name, flush=True)):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_ends_the_process_whatever_it_is_at(second):
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "SIGTERM\n"
            process.send_signal(second)
            assert process.wait(timeout=10) == -second
        finally:
            process.kill()


def start(dataset, out):
    settings = ("epochs=4", "batch_size=128", "log_every=1", "data.image_size=32", "checkpoint.every_minutes=0")
    command = [sys.executable, "-m", "thermopile.tools.cli", "train", "--data", dataset.path, "--out", out, "--resume"]
    overrides = [part for setting in settings for part in ("--set", setting)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*map(str, command), *overrides], **pipes, text=True)


def signalled_once_it_has_made(steps, process, run, number):
    """Exit code and what was printed on stdout and stderr."""
    while not run.metrics_file.exists() or len(run.metrics_file.read_text().splitlines()) < steps:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


def losses(run):
    return [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()]


@pytest.mark.parametrize("signals", [SIGNALS[:1], pytest.param(SIGNALS, marks=pytest.mark.soak)])
def test_a_run_stopped_by_signals_has_the_losses_of_one_never_stopped(pairs_dataset, tmp_path, signals):
    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    process = start(pairs_dataset, whole.path)
    assert "trained 60 steps" in process.communicate()[0]
    for number, at in zip(signals, (3, 20, 45), strict=False):
        code, out, errors = signalled_once_it_has_made(at, start(pairs_dataset, broken.path), broken, number)
        info, _ = load_checkpoint(latest_checkpoint(broken.checkpoints))
        assert code == EXIT_CODE == 75
        assert f"stopped at step {info.step} by {number.name}, with a checkpoint" in out
        assert f"{number.name}: stopping with a checkpoint; a second signal ends the run at once" in errors
        assert at <= info.step == len(losses(broken)) < STEPS
    process = start(pairs_dataset, broken.path)
    assert "trained 60 steps" in process.communicate()[0]
    assert losses(broken) == losses(whole)
    assert len(losses(whole)) == STEPS
