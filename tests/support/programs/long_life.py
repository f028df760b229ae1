"""A process with few descriptors that makes snapshot after snapshot; its last line of output is what it measured.

python tests/support/programs/long_life.py steady PATH SNAPSHOTS, or: starved PATH FAILURES

Descriptors run out below LIMIT.
"""

import json
import os
import random
import resource
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from thermopile.state_store.durable import Repository
from thermopile.state_store.errors import SnapshotError
from thermopile.state_store.reader import StateReader
from thermopile.state_store.schema import Description, Schema

from support.commits import commit

LIMIT = 160
SCHEMA = Schema({"image/tau": 0.0})
# Chunks of 1 KB: icechunk keeps those of up to 512 B in its manifests.
SAMPLES, BLOCK_ROWS = 500, 256
KEEP_LAST = 2
MAX_SECONDS_UNTIL_STARVED = 0.04
"""About as long as a snapshot takes, so that descriptors run out anywhere in it."""


def assert_whole(path, steps):
    for step in steps:
        reader = StateReader.open(path, f"step-{step}")
        assert all((reader.column(name) == step).all() for name in SCHEMA.columns), f"step {step} has other rows"


def measure(path, seconds, cpu_seconds):
    files = [entry for entry in path.rglob("*") if entry.is_file()]
    return {
        "entries": len(list(path.rglob("*"))),
        "bytes": sum(file.stat().st_size for file in files),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memory": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        "seconds_of_100": sum(seconds[-100:]),
        "cpu_seconds_of_100": sum(cpu_seconds[-100:]),
    }


def steady(path, snapshots):
    repository = Repository.create(path, Description(SAMPLES, SCHEMA, BLOCK_ROWS, ""))
    last, seconds, cpu_seconds, measured = repository.resolve("latest"), [], [], []
    for step in range(1, snapshots + 1):
        began, cpu_began = time.perf_counter(), time.process_time()
        last = commit(repository, step, base=last)
        repository.retain(KEEP_LAST)
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
        if step in (min(100, snapshots // 2), snapshots):
            measured.append(measure(path, seconds, cpu_seconds))
    assert [snapshot.step for snapshot in repository.snapshots()] == [0, snapshots - 1, snapshots]
    assert_whole(path, [0, snapshots - 1, snapshots])
    return measured


@contextmanager
def starved_at_some_moment(chance):
    """Leave the process only few descriptors, or none, from some moment of the body on."""
    held = []

    def use_up():
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(chance.choice([0, 0, 1, 2, 3, 5, 8])):
                os.close(held.pop())

    timer = threading.Timer(chance.random() * MAX_SECONDS_UNTIL_STARVED, use_up)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        for descriptor in held:
            os.close(descriptor)


def starved(path, failures):
    repository = Repository.create(path, Description(SAMPLES, SCHEMA, BLOCK_ROWS, ""))
    last, step, failed, chance = repository.resolve("latest"), 0, 0, random.Random(0)
    committed = []
    while failed < failures:
        step += 1
        with starved_at_some_moment(chance):
            try:
                last = commit(repository, step, base=last)
                committed.append(step)
                repository.retain(KEEP_LAST)
            except (SnapshotError, OSError):
                failed += 1
        assert {0, *committed[-KEEP_LAST:]} <= {snapshot.step for snapshot in repository.snapshots()}
        if failed % 10 == 0 or failed == failures:
            assert_whole(path, [0, *committed[-KEEP_LAST:]])
    repository.retain(KEEP_LAST)
    assert_whole(path, [snapshot.step for snapshot in repository.snapshots()])
    return {"snapshots": len(committed), "failures": failed, "entries": len(list(path.rglob("*")))}


def measured(connection, function, path, number):
    """Call `function` with few descriptors, and send what it measured."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    connection.send(function(path, number))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    print(json.dumps({"steady": steady, "starved": starved}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
