"""What a process and its run's directory hold does not grow with the age of the run."""

import os
import signal
import time
from pathlib import Path

import pytest

from thermopile.state_store.durable import list_snapshots

from support.cli import sets

SECONDS = float(os.environ.get("THERMOPILE_SOAK_SECONDS", 2 * 60 * 60))
BETWEEN_LOOKS = 5.0


def resources(pid, run):
    """Memory in MB, threads, descriptors of the process; files and folders of its run."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "memory": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "entries": sum(len(folders) + len(files) for _, folders, files in os.walk(run)),
    }


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 600)
def test_a_run_with_a_checkpoint_every_five_seconds_stays_as_large_as_it_was(start_program, pairs_dataset, tmp_path):
    run, looks = tmp_path / "run", []
    settings = ("batch_size=128", "data.image_size=32", "epochs=1000000", f"checkpoint.every_minutes={5 / 60}")
    program = start_program("train", "--data", pairs_dataset.path, "--out", run, *sets(*settings))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(BETWEEN_LOOKS)
        assert program.is_running(), program.end()
        looks.append(resources(program.pid, run))
    program.send(signal.SIGTERM)
    assert program.end()[0] == 75
    assert list_snapshots(run / "state")[-1].step > 0
    quarter = len(looks) // 4
    second, last = looks[quarter : 2 * quarter], looks[3 * quarter :]
    highest = {name: [max(look[name] for look in part) for part in (second, last)] for name in looks[0]}
    print(f"{len(looks)} looks; highest in the second and in the last quarter: {highest}")
    # Both are peaks: a checkpoint under way holds more, and how much more is a matter of when one looks.
    slack = {"memory": 0.02 * highest["memory"][0], "threads": 2, "descriptors": 10, "entries": 10}
    grown = {name: ends for name, ends in highest.items() if ends[1] > ends[0] + slack[name]}
    assert grown == {}
