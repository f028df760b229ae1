"""A signal at any moment of `thermopile train`, from the start of its process to the end: it ends, and goes on."""

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
HANG_SECONDS = 600
"""Longer than anything takes on a busy machine."""

COLD = """
os.execv(sys.executable, [sys.executable, "-m", "thermopile", *arguments])
"""
"""A new interpreter in the same process, which imports everything."""


def files_of(run):
    """Every file of a run with the time of its last change."""
    return {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}


def steps_logged(run):
    return run.metrics_file.read_bytes().count(b"\n") if run.metrics_file.exists() else 0


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    ("code", "signals"),
    [
        pytest.param(COMMAND_LINE, 12, id="few", marks=pytest.mark.wide),
        pytest.param(COMMAND_LINE, 1950, id="many", marks=pytest.mark.soak),
        pytest.param(COLD, 50, id="cold", marks=pytest.mark.soak),
    ],
)
def test_a_run_that_is_signalled_at_any_moment_stops_and_ends_as_if_never_stopped(
    start_program, pairs_dataset, tmp_path, code, signals
):
    def started(run, kernels):
        words = ("train", "--data", pairs_dataset.path, "--out", run.path, "--resume", *SETTINGS)
        return start_program(*words, code=code, **({"NUMBA_CACHE_DIR": tmp_path / kernels} if code == COLD else {}))

    finish([start_program("--help")])  # the server that forks them has begun
    seconds = {}
    for is_new in (True, False):
        whole, begun = RunDirectory(tmp_path / f"whole-{is_new}"), time.monotonic()
        program = started(whole, "kernels")
        program.process.join(HANG_SECONDS)
        finish([program])
        seconds[is_new] = time.monotonic() - begun
    moments, runs, sent = random.Random(11), 0, 0
    while sent < signals:
        run, runs = RunDirectory(tmp_path / f"run-{runs}"), runs + 1
        exit_code = None
        while exit_code != 0:
            compiles = code == COLD and moments.random() < 0.1
            before, begun = files_of(run), time.monotonic()
            program = started(run, f"kernels-{sent}" if compiles else "kernels")
            while not program.has_said(""):  # it has no handler of the fork server any more
                time.sleep(0.001)
            number, at = moments.choice([signal.SIGTERM, *SIGNALS]), moments.random()
            program.process.join(at * seconds[compiles])
            if is_sent := program.is_running():
                with suppress(ProcessLookupError):
                    program.send(number)
            at_step = steps_logged(run)
            exit_code, out, errors = program.end(within=HANG_SECONDS)
            sent += is_sent
            if not is_sent:  # it ended first: the machine is faster than it was, and later signals shall find a run
                seconds[compiles] = time.monotonic() - begun
            case = f"{number.name} after {at:.3f} of {seconds[compiles]:.1f} s: exit code {exit_code}, {out}{errors}"
            print(case, flush=True)
            is_finished = f"trained {STEPS} steps" in out or "nothing to do" in out
            if exit_code == 0:
                assert is_finished, case
                assert not is_sent or at_step >= STEPS - 3, case
            elif exit_code != EXIT_CODE:  # no handler is there yet, or none any more
                assert exit_code in ([-number, 1] if number == signal.SIGINT else [-number]), case
                assert is_finished or files_of(run) == before, case
        assert_same_run(run, whole)
