"""Ranks find each other again after a restart by torchrun; tests/hosts has those of several machines."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.wide

RESTARTED = """
import os, signal
from thermopile.trainer.world import joined_world
with joined_world() as world:
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    assert world.all_gather([world.rank]) == [[0], [1]]
    if restarts < 2 and world.rank == restarts:
        os.kill(os.getpid(), signal.SIGKILL)
    world.any_rank(False)
    print(f"joined after {restarts} restarts", flush=True)
"""


def test_ranks_that_torchrun_restarts_do_not_look_for_those_that_died(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RESTARTED)
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", program)
    torchrun = (sys.executable, "-m", "torch.distributed.run", *options)
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("joined after 2 restarts") == 2  # the two may write them on one line
