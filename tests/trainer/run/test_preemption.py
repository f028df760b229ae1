"""A signal stops a run with a checkpoint; a second one ends it at once; either way it goes on as if never stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from thermopile.benchmarks.object_server import free_port
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.preemption import EXIT_CODE, SIGNALS, StopRequest
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.runs import losses, small, train, wait_for


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
from thermopile.trainer.run.preemption import StopRequest
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


AT_EACH_BYTECODE = """
import os, signal, sys
from collections import Counter
from thermopile.trainer.run import preemption

def run(number, at):
    left, made = at, []
    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != preemption.__file__:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if event == "opcode" and left == 0:
            made.append("signal")
            signal.raise_signal(number)
        return trace
    sys.settrace(trace)
    with preemption.ending_on_signals():
        with preemption.StopRequest() as stop:
            for _ in range(3):
                if stop():
                    os._exit(preemption.EXIT_CODE)
                made.append("step")
    sys.settrace(None)
    os._exit(1 if "signal" in made[-2:] else 2 if "signal" in made else 0)  # one step more may have begun

number, at, code = int(sys.argv[1]), 0, 1
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
while code:
    at += 1
    if not (child := os.fork()):
        run(number, at)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_between_any_two_bytecodes_before_the_last_step_stops_the_run(number):
    ended = subprocess.run(
        [sys.executable, "-c", AT_EACH_BYTECODE, str(int(number))], check=True, stdout=subprocess.PIPE, text=True
    )
    codes = [*map(int, ended.stdout.split())]
    assert codes.count(0) == 1, "the last one, without a signal"
    assert 2 not in codes, f"steps made after a signal at bytecode {codes.index(2)}"
    ends = [code for code, after in pairwise(codes) if code != after]
    # Without a handler yet, or any more, the signal does what it always does. Once the last step has been made, it may
    # be ignored, but where closing the run may still take long.
    assert ends == [-number, EXIT_CODE, 1, EXIT_CODE, 1, -number]


def test_a_run_stopped_by_every_signal_in_turn_has_the_losses_of_one_never_stopped(finished, pairs_dataset, tmp_path):
    config, broken = small(pairs_dataset), RunDirectory(tmp_path / "broken")
    for number, at in zip(SIGNALS, (3, 5, 10), strict=True):

        def send_once(report, number=number, at=at):
            if report.step == at:
                os.kill(os.getpid(), number)

        with Trainer.open(config, broken, resume=broken.exists()) as trainer, StopRequest() as stop:
            trainer.train(send_once, stop)
            # The report comes before the checkpoint of its own step, so the step after it is the last.
            assert trainer.run.steps_done == len(losses(broken)) == at + 1
        assert latest_checkpoint(broken.checkpoints).name == f"step-{at + 1}"
    assert losses(train(config, broken, resume=True)) == losses(finished)


def test_the_command_ends_with_a_code_of_its_own_and_says_how_to_go_on(start_program, pairs_dataset, tmp_path):
    run = RunDirectory(tmp_path / "run")
    settings = sets("epochs=50", "log_every=1", "data.image_size=16")
    program = start_program("train", "--data", pairs_dataset.path, "--out", run.path, *settings)
    wait_for(run, 1, [program])
    program.send(signal.SIGTERM)
    code, out, errors = program.end(within=60)
    assert code == EXIT_CODE == 75
    assert f"stopped at step {len(losses(run))} by SIGTERM, checkpoint written; continue with --resume" in out
    assert "SIGTERM: writing a checkpoint, then stopping; a second signal ends the run at once" in errors


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_signal_before_the_first_step_ends_the_command_with_the_same_code(start_program, pairs_dataset, tmp_path):
    port = free_port()
    launched = {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    program = start_program("train", "--data", pairs_dataset.path, "--out", tmp_path / "run", **launched)
    while not listens(port):  # then it waits for the other rank
        assert program.is_running()
        time.sleep(0.05)
    program.send(signal.SIGUSR1)
    code, _, errors = program.end(within=30)
    assert code == EXIT_CODE
    assert errors == "\nSIGUSR1: stopped while no step was being made; continue with --resume\n"
    assert not (tmp_path / "run").exists()
