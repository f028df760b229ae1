"""A store of many rows in a bucket, written while rows change, and killed again and again: what is found each time.

python tests/support/programs/bucket_kills.py ROWS KILLS [SECONDS]

SECONDS: the longest time from the start of a run to its kill. Prints a line for each kill, and the figures at the end.
"""

import math
import os
import random
import resource
import subprocess
import sys
import time
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
import torch

from thermopile.state_store.durable import list_snapshots
from thermopile.state_store.history import INDEX
from thermopile.state_store.reader import StateReader
from thermopile.state_store.store import StateStore
from thermopile.storage.bucket import SCRATCH, Address

from support.programs.crashing import ExpectedState

BATCH, STEP_SECONDS = 8_192, 0.02
FIELDS = {"image/log_s": -math.inf, "image/tau": 0.05, "image/u": 0.0,
          "text/log_s": -math.inf, "text/tau": 0.05, "text/u": 0.0}  # fmt: skip
STATE = Address("bucket", "runs/a/state")


def batch_of_step(step: int, rows: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return ids all over the store, and new rows: the same in every process."""
    first = (step * 7919) % (rows // BATCH)
    ids = np.sort((first + np.arange(BATCH, dtype=np.int64) * (rows // BATCH)) % rows)
    values = np.random.default_rng(step).standard_normal(BATCH, dtype=np.float32)
    return ids, {name: values + place for place, name in enumerate(FIELDS)}


def train(rows: int) -> None:
    """Say the step of every announced snapshot, until killed."""
    made_for = {"samples": rows, "fields": FIELDS, "dataset_fingerprint": "kills"}
    store = (StateStore.open(STATE, **made_for) if STATE.holds(INDEX)
             else StateStore.create(STATE, block_rows=65_536, **made_for))  # fmt: skip
    step, snapshot, began = store.last_snapshot.step, None, 0.0
    print("ready", step, flush=True)
    while True:
        step += 1
        ids, new = batch_of_step(step, rows)
        store.take(ids)
        store.put(ids, {name: torch.from_numpy(row) for name, row in new.items()}, step=step)
        time.sleep(STEP_SECONDS)
        if snapshot is not None and snapshot.done():
            written = snapshot.result()
            print("announced", written.step, written.bytes_written, time.monotonic() - began, flush=True)
            store.retain(2)
            snapshot = None
        if snapshot is None and step % 10 == 0:
            snapshot, began = store.snapshot(step, epoch=0), time.monotonic()


def run_and_kill(rows: int, moments: random.Random, longest: float) -> list[tuple[int, int, float]]:
    """Train for up to `longest` seconds, then kill; return step, bytes and seconds of what was announced."""
    process = subprocess.Popen([sys.executable, __file__, "train", str(rows)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready"), "the run did not start"
    time.sleep(moments.uniform(0, longest))
    process.kill()
    said = [line.split() for line in process.stdout.read().splitlines() if line.count(" ") == 3]
    process.wait()
    return [(int(step), int(size), float(seconds)) for _, step, size, seconds in said]


def main(rows: int, kills: int, longest: float) -> None:
    from thermopile.benchmarks.object_server import object_server

    moments, expected, announced, held = (
        random.Random(11),
        ExpectedState(rows, FIELDS, partial(batch_of_step, rows=rows)),
        [],
        0,
    )
    counts, kept = [], 0
    with object_server(), TemporaryDirectory() as scratch:
        os.environ[SCRATCH] = scratch
        for kill in range(1, kills + 1):
            said = run_and_kill(rows, moments, longest)
            announced += said
            snapshots = list_snapshots(STATE)
            kept = max([kept, *(step for step, _, _ in said)])
            assert snapshots[-1].step >= kept, f"step {kept} was announced, but the last is {snapshots[-1].tag}"
            kept = snapshots[-1].step
            reader = StateReader.open(STATE)
            for name, column in expected.after(kept).items():
                np.testing.assert_array_equal(reader.column(name), column, err_msg=f"{name} at {reader.snapshot.tag}")
            counts.append(sum(1 for _ in STATE.listing()))
            held = max(held, sum(size for _, size, _ in STATE.listing()))
            print(
                f"kill {kill}: {len(said)} announced, {reader.snapshot.tag} exact, {counts[-1]:,} objects", flush=True
            )
        # A run that is killed leaves objects that the next one's retention deletes.
        rates = sorted(size / seconds for _, size, seconds in announced if size > 16 * rows)
        print(
            f"{rows:,} rows, {kills} kills, {len(announced)} snapshots announced, last {snapshots[-1].tag}; "
            f"objects after a kill: {min(counts):,} to {max(counts):,}, at most {held / 1e9:.2f} GB; "
            f"snapshots of most rows: {len(rates)}, {rates[len(rates) // 2] / 1e6 if rates else 0:.0f} MB/s; "
            f"peak memory here {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB"
        )


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(int(sys.argv[2]))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 40.0)
