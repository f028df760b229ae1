"""What two ranks that share a store do in test_shared_store, each in a process of its own.

`serve` runs what the test sends: one of the functions below, called with this rank's `ranks`.
"""

from dataclasses import replace
from itertools import count

import numpy as np
from torch.distributed import init_process_group, new_group

from thermopile.pipeline.order.order import Order
from thermopile.state_store.commit import ColumnPart
from thermopile.state_store.durable import Repository
from thermopile.state_store.errors import SnapshotError
from thermopile.state_store.ranks import TorchRanks
from thermopile.state_store.schema import Schema
from thermopile.state_store.store import StateStore

from support import commits


def serve(connection, rank, meeting_point):
    init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    ranks = TorchRanks(new_group(backend="gloo"))
    while True:
        function, arguments = connection.recv()
        connection.send(function(ranks, *arguments))


# Snapshots that both commit, or that fail

SCHEMA = Schema({"image/tau": 0.05})
SAMPLES, BLOCK_ROWS = 2_000, 256
HALVES = ((0, 1_024), (1_024, SAMPLES))


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("this error stays where it is")


def half(rank, value):
    """Every column of a rank's half of the rows, a block a part."""
    start, stop = HALVES[rank]
    for first in range(start, stop, BLOCK_ROWS):
        rows = min(first + BLOCK_ROWS, stop) - first
        yield ColumnPart(first, {name: np.full(rows, value, SCHEMA.dtype(name)) for name in SCHEMA.columns})


def failing_half(rank, value):
    yield next(half(rank, value))
    raise UnpicklableError(f"rank {rank} lost its rows")


def commit_all(ranks, path):
    """Return for each commit its name, and the snapshot's tag and size or the error that it raised."""
    rank, repository, told = ranks.rank, Repository(path), {}

    def commit(name, step, parts):
        try:
            snapshot = commits.commit(repository, step, parts, epoch=1, config_hash="c0ffee", ranks=ranks)
            told[name] = [snapshot.tag, snapshot.bytes_written]
        except SnapshotError as error:
            told[name] = [str(error)]

    commit("both", 1, half(rank, 10 + rank))
    commit("rank 0 alone has rows", 2, half(rank, 20) if rank == 0 else [])
    commit("rank 1 fails", 3, failing_half(rank, 30) if rank == 1 else half(rank, 30))
    commit("rank 0 fails", 3, failing_half(rank, 30) if rank == 0 else half(rank, 30))
    commit("both fail", 3, failing_half(rank, 30))
    commit("after the failures", 3, half(rank, 30 + rank))
    return told


# Stores that both train

ORDER = Order.create(4_000, 128, seed=2, canonical_shards=4, blocks_per_shard=6, window_blocks=2)
FIELDS = {"image/tau": 0.05, "image/u": 0.5}
STEPS_BETWEEN_SNAPSHOTS, STEPS_KEPT = 5, 10
LIVE_ROWS = (ORDER.window_blocks + 2) * ORDER.canonical_shards * ORDER.block_rows
BUDGETS = {"resident": None, "windowed": LIVE_ROWS * 4 * Schema(FIELDS).row_words}
"""For one process; each of two ranks has half as many shards to hold."""


def store_at(path, kind, ranks, **changes):
    """Create the store of this rank, or open it if it exists; with some settings replaced by `changes`."""
    settings = {
        "samples": ORDER.samples,
        "fields": FIELDS,
        "dataset_fingerprint": "shared",
        "memory_budget": BUDGETS[kind] and BUDGETS[kind] // ranks.world,
        "ranks": ranks,
        "owned": ORDER.rank_ids(ranks.rank, ranks.world),
    } | changes
    if path.exists():
        return StateStore.open(path, **settings)
    return StateStore.create(path, block_rows=ORDER.block_rows, **settings)


def windows(ranks):
    """The windows of all epochs, numbered as puts are."""
    for epoch in count():
        first = 1 + epoch * ORDER.steps_per_epoch
        for window in ORDER.windows(epoch, ranks.rank, ranks.world):
            yield replace(window, first_step=first + window.first_step, last_step=first + window.last_step)


def train(store, ranks, last):
    """Make the steps up to `last`; new rows depend on the old ones, so that any mistake is handed on."""
    store.expect(windows(ranks))
    for step in range(store.last_snapshot.step + 1, last + 1):
        ids, coming = (
            ORDER.batch_ids(*divmod(number - 1, ORDER.steps_per_epoch), ranks.rank, ranks.world)
            for number in (step, step + 1)
        )
        state = store.take(ids)
        store.prefetch(coming)
        store.put(ids, {name: 0.5 * state[name] + step + i for i, name in enumerate(FIELDS)}, step=step)
        if step % STEPS_BETWEEN_SNAPSHOTS == 0:
            store.snapshot(step, epoch=0)
            store.retain(keep_last=1, keep_every=STEPS_KEPT)


def train_both_kinds(ranks, directory, last):
    """Return which kinds of store read blocks, and which wrote some."""
    told = {}
    for kind in BUDGETS:
        with store_at(directory / kind, kind, ranks) as store:
            train(store, ranks, last)
            store.flush()
            told[kind] = (store.blocks_read > 0, store.blocks_written > 0)
    return told


# Settings that one rank has wrong

MISTAKES = [
    ("open", "dataset_fingerprint", "another"),
    ("create", "device", "no such device"),
    ("open", "device", "no such device"),
    ("create", "memory_budget", 1),
    ("open", "memory_budget", 1),
]
"""A call, and a setting of it that one rank is given while the other has the right one."""


def make_mistakes(ranks, directory):
    """Give one rank, and then the other, a wrong setting; after each, let both go on. Return what was raised."""
    store_at(directory / "there", "resident", ranks).close()
    told = {}
    for wrong in range(ranks.world):
        for call, setting, value in MISTAKES:
            path = directory / ("there" if call == "open" else f"{setting} {wrong}")
            try:
                store_at(path, "resident", ranks, **({setting: value} if ranks.rank == wrong else {})).close()
            except Exception as error:  # noqa: BLE001 (any: returned)
                told[call, setting, wrong] = (type(error).__name__, str(error))
            store_at(path, "resident", ranks).close()
    return told
