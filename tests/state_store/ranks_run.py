"""One of two ranks that commit snapshots together; test_ranks starts both as processes of their own.

Prints a line of JSON for each commit: its name, and the snapshot's tag and size or the error that it raised.
"""

import json
import sys
from pathlib import Path

import numpy as np
from torch.distributed import destroy_process_group, init_process_group, new_group

from thermopile.state_store import SnapshotError
from thermopile.state_store.commit import ColumnPart
from thermopile.state_store.durable import Repository
from thermopile.state_store.ranks import TorchRanks
from thermopile.state_store.schema import Schema

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


def main(rank, meeting_point, path):
    init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    ranks, repository = TorchRanks(new_group(backend="gloo")), Repository.open(path)

    def commit(name, step, parts):
        try:
            snapshot = repository.commit(
                parts, base=repository.resolve("latest"), step=step, epoch=1,
                config_hash="c0ffee", dataset_fingerprint="glyphs-1", ranks=ranks,
            )  # fmt: skip
            told = [name, snapshot.tag, snapshot.bytes_written]
        except SnapshotError as error:
            told = [name, str(error)]
        print(json.dumps(told), flush=True)

    commit("both", 1, half(rank, 10 + rank))
    commit("rank 0 alone has rows", 2, half(rank, 20) if rank == 0 else [])
    commit("rank 1 fails", 3, failing_half(rank, 30) if rank == 1 else half(rank, 30))
    commit("rank 0 fails", 3, failing_half(rank, 30) if rank == 0 else half(rank, 30))
    commit("both fail", 3, failing_half(rank, 30))
    commit("after the failures", 3, half(rank, 30 + rank))
    destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
