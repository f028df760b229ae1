"""One of two ranks that share a store; test_shared_store starts both as processes of their own.

Arguments: the rank, a file for the ranks to meet at, the directory of the stores, and `train FIRST LAST` or `refuse`.
Prints a line of JSON for each thing it has done.
"""

import json
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

from torch.distributed import destroy_process_group, init_process_group, new_group

from thermopile.pipeline.order import Order
from thermopile.state_store import StateStore
from thermopile.state_store.ranks import TorchRanks
from thermopile.state_store.schema import Schema

ORDER = Order.create(4_000, 128, seed=2, canonical_shards=4, blocks_per_shard=6, window_blocks=2)
FIELDS = {"image/tau": 0.05, "image/u": 0.5}
STEPS_BETWEEN_SNAPSHOTS, STEPS_KEPT = 5, 20
LIVE_ROWS = (ORDER.window_blocks + 2) * ORDER.canonical_shards * ORDER.block_rows
BUDGETS = {"resident": None, "windowed": LIVE_ROWS * 4 * Schema(FIELDS).row_words}
"""Of one process; each of two ranks has half as many shards to hold."""
MISTAKES = [
    ("open", "dataset_fingerprint", "another"),
    ("create", "device", "no such device"),
    ("open", "device", "no such device"),
    ("create", "memory_budget", 1),
    ("open", "memory_budget", 1),
]
"""A call, and a setting of it that one rank is given while the other has the right one."""


def store_at(path, kind, ranks, **changes):
    """Create the store of this rank, or open the one that there is; with some settings replaced by `changes`."""
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


def train_both_kinds(directory, ranks, last):
    for kind in BUDGETS:
        with store_at(directory / kind, kind, ranks) as store:
            train(store, ranks, last)
            store.flush()
            tell(kind, store.blocks_read > 0, store.blocks_written > 0)


def refuse(directory, ranks):
    """Tell one rank, and then the other, something that cannot be; after each, let both go on."""
    store_at(directory / "there", "resident", ranks).close()
    for wrong in range(ranks.world):
        for call, setting, value in MISTAKES:
            path = directory / ("there" if call == "open" else f"{setting} {wrong}")
            attempt(f"{call}, {setting} of rank {wrong}", path, ranks, {setting: value} if ranks.rank == wrong else {})


def attempt(name, path, ranks, changes):
    try:
        store_at(path, "resident", ranks, **changes).close()
        tell(name, None, "nothing was wrong")
    except Exception as error:  # noqa: BLE001 (any: told)
        tell(name, type(error).__name__, str(error))
    store_at(path, "resident", ranks).close()


def tell(*what):
    print(json.dumps(what), flush=True)


def main(rank, meeting_point, directory, task, *arguments):
    init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    ranks = TorchRanks(new_group(backend="gloo"))
    if task == "train":
        train_both_kinds(directory, ranks, *map(int, arguments))
    else:
        refuse(directory, ranks)
    destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
