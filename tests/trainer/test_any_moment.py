"""A signal at any moment of `thermopile train`, from the start of its process to the end: it ends, and goes on."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest

from thermopile.trainer.run.preemption import EXIT_CODE, SIGNALS
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.runs import assert_same_run, finish
from support.started import COMMAND_LINE

STEPS = 42
SETTINGS = sets(
    "epochs=6", "batch_size=256", "log_every=1", "checkpoint.every_steps=5", "data.image_size=16",
    "model.dim=16", "model.image.config.width=4", "model.text.config.width=8",
)  # fmt: skip
HANG_SECONDS = 300

COLD = """
os.execv(sys.executable, [sys.executable, "-m", "thermopile", *arguments])
"""
"""A new interpreter in the same process, which imports everything, and compiles all kernels again."""


def files_of(run):
    """Every file of a run with the time of its last change."""
    return {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}


def steps_logged(run):
    return run.metrics_file.read_bytes().count(b"\n") if run.metrics_file.exists() else 0


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    ("code", "signals"),
    [
        pytest.param(COMMAND_LINE, 40, id="warm", marks=pytest.mark.wide),
        pytest.param(COLD, 4, id="cold", marks=pytest.mark.wide),
        pytest.param(COMMAND_LINE, 1950, id="warm_many", marks=pytest.mark.soak),
        pytest.param(COLD, 50, id="cold_many", marks=pytest.mark.soak),
    ],
)
def test_a_run_that_is_signalled_at_any_moment_stops_and_ends_as_if_never_stopped(
    start_program, pairs_dataset, tmp_path, code, signals
):
    def started(run):
        caches = {"NUMBA_CACHE_DIR": tmp_path / f"kernels-{time.monotonic_ns()}"} if code == COLD else {}
        words = ("train", "--data", pairs_dataset.path, "--out", run.path, "--resume", *SETTINGS)
        return start_program(*words, code=code, **caches)

    finish([start_program("--help")])  # the server that forks them has begun
    whole, begun = RunDirectory(tmp_path / "whole"), time.monotonic()
    finish([started(whole)])
    seconds = time.monotonic() - begun
    moments, runs, sent = random.Random(11), 0, 0
    while sent < signals:
        run, runs = RunDirectory(tmp_path / f"run-{runs}"), runs + 1
        exit_code = None
        while exit_code != 0:
            before, program = files_of(run), started(run)
            while not program.has_said(""):  # it has no handler of the fork server any more
                time.sleep(0.001)
            number, at = moments.choice([signal.SIGTERM, *SIGNALS]), moments.random()
            program.process.join(at * seconds)
            is_sent = program.is_running()
            with suppress(ProcessLookupError):
                program.send(number)
            at_step = steps_logged(run)
            exit_code, out, errors = program.end(within=HANG_SECONDS)
            sent += is_sent
            case = f"{number.name} after {at:.3f} of {seconds:.1f} s: exit code {exit_code}, {out}{errors}"
            print(case)
            is_finished = f"trained {STEPS} steps" in out or "nothing to do" in out
            if exit_code == 0:
                assert is_finished and (not is_sent or at_step >= STEPS - 3), case
            elif exit_code != EXIT_CODE:  # no handler is there yet, or none any more
                assert exit_code in ([-number, 1] if number == signal.SIGINT else [-number]), case
                assert is_finished or files_of(run) == before, case
        assert_same_run(run, whole)
