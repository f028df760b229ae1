"""What very large datasets ask of the order, the state store, the cache and the object store, tried on made-up shards.

\b
budget    what a run needs, computed from the order, the cache and the rates that the other benchmarks found
epoch     steps of an order over 10^9 ids, with the state's and the dataset's real reading ahead, but without pixels;
          the dataset's objects are links to one shard's files, and each request takes as long as one to a store
snapshot  snapshots of rows that have all changed, in a bucket: moto's server (object_server.py)
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from unittest.mock import patch

import numpy as np
import torch

from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.remote.samples import REQUEST_BYTES
from thermopile.pipeline.sources.shards import MAX_SHARD_ROWS
from thermopile.state_store.store import StateStore
from thermopile.storage.bucket import Address
from thermopile.trainer.config import DataConfig
from thermopile.trainer.run.build import windows_from
from thermopile.trainer.run.dataset_cache import RECORD_BYTES, DatasetCache
from thermopile.trainer.world import ALONE

from .harness import Figure, Measured, Part, counted, peak_memory, script, timed
from .made import make_pairs
from .object_server import object_server
from .state import FIELDS, ROW_BYTES

BLOCK_ROWS = 65_536


# Found by planning.py for 10^8 rows, and by the part `snapshot`.
TSV_SECONDS, PARQUET_SECONDS = 43.9e-8, 4.5e-8
"""To list and cut a row. The tokenizer takes half a minute, however many there are."""
TSV_BYTES = 8.7
"""Memory that planning takes for each row, besides 0.4 GB."""
REQUESTS_A_BLOCK, MANIFEST_BYTES_A_BLOCK = 8.2, 159


@dataclass(frozen=True)
class BudgetSizes:
    """A run with its dataset and its own files in a bucket. Prices: Amazon's S3, us-east-1."""

    samples: int = 400_000_000
    ranks: int = 8
    batch: int = 16_384
    samples_per_second: float = 20_000.0
    """That the encoders take, on all ranks."""
    sample_bytes: int = 25_000
    cache_gb: float = 200.0
    """data.cache, for each rank."""
    memory_gb: float = 0.0
    """state.memory_budget, for each rank; 0: unset."""
    snapshot_minutes: float = 60.0
    dollars_a_million_reads: float = 0.4
    dollars_a_million_writes: float = 5.0
    dollars_a_tb_and_month: float = 23.0


def budget(sizes: BudgetSizes, directory: Path) -> Measured:
    """Compute it; nothing is run."""
    shards = -(-sizes.samples // MAX_SHARD_ROWS)
    first_id = np.minimum(np.arange(shards + 1, dtype=np.int64) * MAX_SHARD_ROWS, sizes.samples)
    shard_bytes = np.diff(first_id) * sizes.sample_bytes
    cache = DatasetCache("", int(sizes.cache_gb * 1e9), True, first_id, shard_bytes, sizes.ranks)
    order = _order(sizes, cache)
    epoch_hours = sizes.samples / sizes.samples_per_second / 3600
    blocks = order.canonical_shards * order.blocks_per_shard
    of_block = -(-order.block_rows * sizes.sample_bytes // REQUEST_BYTES) + 1
    windowed = order.window_blocks < order.blocks_per_shard
    between = sizes.snapshot_minutes / 60 / epoch_hours
    changed = min(blocks, between * blocks + order.live_rows / order.block_rows) if windowed else blocks
    writes, snapshots = changed * REQUESTS_A_BLOCK, epoch_hours * 60 / sizes.snapshot_minutes
    tb = sizes.samples * (sizes.sample_bytes + RECORD_BYTES) / 1e12
    return Measured(
        f"{sizes.samples:,} pairs of {sizes.sample_bytes:,} B in {shards:,} shards, {sizes.ranks} ranks, batch "
        f"{sizes.batch:,}, {sizes.samples_per_second:,.0f} samples/s, data.cache {sizes.cache_gb:g} GB; "
        f"windows of {order.window_blocks:,} of {order.blocks_per_shard:,} blocks of {order.block_rows:,} rows in "
        f"{order.canonical_shards} shards",
        "",
        [
            Figure("epoch_hours", "an epoch", "h", epoch_hours),
            Figure("plan_tsv_minutes", "plan a conversion of a tsv", "min", sizes.samples * TSV_SECONDS / 60 + 0.5),
            Figure("plan_tsv_gb", "its memory", "GB", 0.4 + sizes.samples * TSV_BYTES / 1e9),
            Figure("plan_parquet_minutes", "of parquet files", "min", sizes.samples * PARQUET_SECONDS / 60 + 0.5),
            Figure("dataset_tb", "dataset in the store", "TB", tb),
            Figure("dataset_dollars", "its price", "$/month", tb * sizes.dollars_a_tb_and_month),
            Figure("floor_gb", "least data.cache of a rank", "GB", cache.needed(order) / 1e9),
            Figure("records_gb", "of it for records", "GB", RECORD_BYTES * sizes.samples / sizes.ranks / 1e9),
            Figure("fetched_gb", "fetched, all ranks", "GB/s", sizes.samples_per_second * sizes.sample_bytes / 1e9),
            Figure("reads", "reads, all ranks", "/s", of_block * blocks / epoch_hours / 3600),
            Figure("reads_dollars", "their price", "$/epoch", of_block * blocks * sizes.dollars_a_million_reads / 1e6),
            Figure("rows_gb", "rows of state, all ranks", "GB", sizes.samples * ROW_BYTES / 1e9),
            Figure("rows_of_rank_gb", "a rank's in memory", "GB",
                   sizes.memory_gb or sizes.samples * ROW_BYTES / sizes.ranks / 1e9),
            Figure("snapshot_gb", "a snapshot", "GB", changed * order.block_rows * ROW_BYTES / 1e9),
            Figure("snapshot_writes", "its requests", "", writes),
            Figure("manifests_mb", "its manifests", "MB", blocks * MANIFEST_BYTES_A_BLOCK / 1e6),
            Figure("snapshot_dollars", "snapshots' price", "$/epoch",
                   snapshots * writes * sizes.dollars_a_million_writes / 1e6),
        ],
    )  # fmt: skip


def _order(sizes: BudgetSizes, cache: DatasetCache) -> Order:
    """The order that `train` makes of these settings, for as many canonical shards as ranks, and at least eight."""
    for_memory = partial(Order.for_memory, samples=sizes.samples, batch_size=sizes.batch,
                         canonical_shards=max(8, sizes.ranks))  # fmt: skip
    budget = int(sizes.memory_gb * 1e9) * sizes.ranks // ROW_BYTES
    rows = min(budget or sizes.samples, cache.rows)
    return for_memory(cache.narrowed(for_memory(rows), rows))


@dataclass(frozen=True)
class EpochSizes:
    """Steps of one rank that reads all ids, with windows for `rows_in_memory`."""

    shards: int = 7_630
    shard_rows: int = 131_072
    rows_in_memory: int = 10**7
    batch: int = 16_384
    windows: int = 3
    """How many windows' steps are taken; the first fills the memory, and is not counted."""
    step_ms: float = 100.0
    latency: float = 0.02


class FolderStore:
    """A folder's files, read as objects: ranges are counted, and each comes after `latency` seconds."""

    def __init__(self, folder: Path, latency: float) -> None:
        self.requests = self.bytes = 0
        self._folder, self._latency, self._lock = folder, latency, Lock()

    def in_place(self) -> AbstractContextManager[object]:
        """Let all addresses lead here."""

        def read_bytes(address: Address, max_bytes: int = 0) -> bytes:
            return (self._folder / address.key).read_bytes()

        def read_range(address: Address, start: int, length: int, ended: object = None, version: str = "") -> bytes:
            time.sleep(self._latency)
            with self._lock:
                self.requests, self.bytes = self.requests + 1, self.bytes + length
            with (self._folder / address.key).open("rb") as file:
                file.seek(start)
                return file.read(length)

        def listing(address: Address) -> list[tuple[str, int, str]]:
            return [(entry.name, entry.stat().st_size, "") for entry in os.scandir(self._folder / address.key)]

        return patch.multiple(Address, read_bytes=read_bytes, read_range=read_range, listing=listing)


def epoch(sizes: EpochSizes, directory: Path) -> Measured:
    """Take the first windows' steps of an epoch."""
    os.environ["THERMOPILE_CACHE"] = str(directory / "cache")
    make_pairs(directory / "dataset", sizes.shard_rows, sizes.shards)
    objects = FolderStore(directory, sizes.latency)
    with objects.in_place():
        return _epoch(sizes, directory / "state", objects)


def _epoch(sizes: EpochSizes, state: Path, objects: FolderStore) -> Measured:
    began = time.perf_counter()
    dataset = Dataset(Address("bucket", "dataset"))
    order = Order.for_memory(min(sizes.rows_in_memory, dataset.n // 10), dataset.n, sizes.batch)
    opened = time.perf_counter() - began
    floor = _cache(dataset, 1 << 60).needed(order)
    steps_of_window = order.window_blocks * order.block_rows // order.rows_per_step
    steps = min(sizes.windows * steps_of_window, order.steps_per_epoch)
    # An epoch later the records of all ids would take their part of the cache, so they get none of it now.
    limit = floor - RECORD_BYTES * (dataset.n - steps * order.batch_size)
    with (
        StateStore.create(
            state, dataset.n, FIELDS, block_rows=order.block_rows, dataset_fingerprint="benchmark",
            memory_budget=max(sizes.rows_in_memory, order.live_rows * 3 // 2) * ROW_BYTES,
        ) as store,
        dataset.files.expect(windows_from(0, order, 1), order, limit),
    ):  # fmt: skip
        store.expect(windows_from(0, order, 1))
        first = min(steps_of_window + 2, steps - 1)
        take_steps = partial(_take_steps, order, store, dataset, objects, sizes.step_ms)
        take_steps(range(first))  # their figures are not counted
        figures = take_steps(range(first, steps))
    shard_bytes = dataset.files.beton_bytes()
    assert shard_bytes is not None
    return Measured(
        f"{steps - first:,} of {order.steps_per_epoch:,} steps of {sizes.step_ms:g} ms, after the first window's "
        f"{first:,}; {dataset.n:,} ids in {dataset.shards:,} shards of "
        f"{shard_bytes[0] / 1e6:,.0f} MB, batch {order.batch_size:,}; windows of {order.window_blocks} "
        f"of {order.blocks_per_shard:,} blocks of {order.block_rows:,} rows in {order.canonical_shards} shards; "
        f"{sizes.latency * 1e3:g} ms a request",
        "",
        [
            *figures,
            Figure("floor_gb", "least data.cache", "GB", floor / 1e9),
            Figure("records_gb", "of it for all samples' records", "GB", RECORD_BYTES * dataset.n / 1e9),
            Figure("open_seconds", "open the dataset, make the order", "s", opened, at_most=60),
            Figure("memory_gb", "peak memory", "GB", peak_memory() / 1e9),
        ],
    )


def _take_steps(
    order: Order, store: StateStore, dataset: Dataset, objects: FolderStore, step_ms: float, steps: range
) -> list[Figure]:
    """Take steps as a trainer does: samples held, rows taken and put; what one took, on the average."""

    def counts() -> tuple[int, int, int, int]:
        return objects.requests, objects.bytes, store.blocks_read, store.blocks_written

    state = {name: torch.rand(order.batch_size) for name in store.fields}
    order_seconds = hold_seconds = state_wait = 0.0
    before, fetching, began = counts(), dataset.files.seconds_waited(), time.perf_counter()
    for done in counted("epoch", len(steps)):
        step, making = steps[done], time.perf_counter()
        ids = order.batch_ids(0, step)
        order_seconds += time.perf_counter() - making
        hold_seconds += timed(lambda ids: dataset.files.hold(ids).release(), ids)
        rows = torch.from_numpy(ids)
        state_wait += timed(store.take, rows)
        time.sleep(step_ms / 1e3)
        state_wait += timed(store.put, rows, state, step=1 + step)
        dataset.files.finished(1 + step)
    whole, fetch_wait = time.perf_counter() - began, dataset.files.seconds_waited() - fetching
    count, size, read, written = ((end - start) / len(steps) for end, start in zip(counts(), before, strict=True))
    return [
        Figure("order_ms", "ids of a step", "ms", 1e3 * order_seconds / len(steps)),
        Figure("requests", "requests a step", "", count),
        Figure("bytes_a_sample", "bytes fetched, a sample", "B", size / order.batch_size),
        Figure("blocks_read", "the state's blocks read, a step", "", read),
        Figure("blocks_written", "the state's blocks written, a step", "", written),
        Figure("hold_ms", "finding the samples of a step in the cache", "ms", 1e3 * hold_seconds / len(steps)),
        Figure("fetch_wait_percent", "waiting for samples", "%", 100 * fetch_wait / whole),
        Figure("state_wait_percent", "waiting for the state", "%", 100 * state_wait / whole),
    ]


def _cache(dataset: Dataset, limit: int) -> DatasetCache:
    cache = DatasetCache.of(DataConfig(cache=limit), dataset, ALONE)
    assert cache is not None
    return cache


@dataclass(frozen=True)
class SnapshotSizes:
    """Two snapshots, each of rows that have all changed."""

    rows: int = 2 * 10**7


def snapshot(sizes: SnapshotSizes, directory: Path) -> Measured:
    """Write them through a gateway that counts."""
    seconds, requests = [], []
    with object_server() as server, server.gateway() as gateway:
        place = Address("bucket", "state")
        with StateStore.create(
            place, sizes.rows, FIELDS, block_rows=min(BLOCK_ROWS, sizes.rows), dataset_fingerprint="benchmark"
        ) as store:
            for step in counted("snapshot", 2):
                _put_all(store, sizes.rows, step + 1)
                before = gateway.stats()["requests"]
                seconds.append(timed(_snapshot, store, step + 1))
                requests.append(gateway.stats()["requests"] - before)
            size = store.last_snapshot.bytes_written
        references = sum(length for name, length, _ in place.listing() if "manifests/" in name)
    blocks = -(-sizes.rows // BLOCK_ROWS)
    return Measured(
        f"{sizes.rows:,} rows of {ROW_BYTES} B, all changed, in {blocks:,} blocks; the second of two snapshots",
        "",
        [
            Figure("seconds", "until announced", "s", seconds[-1]),
            Figure("megabytes", "written", "MB", size / 1e6),
            Figure("requests", "requests", "", requests[-1]),
            Figure("requests_a_block", "requests a block", "", requests[-1] / blocks),
            Figure("manifest_bytes", "bytes of manifests, a block and snapshot", "B", references / blocks / 2),
        ],
    )


def _snapshot(store: StateStore, step: int) -> None:
    store.snapshot(step, epoch=0).result()


def _put_all(store: StateStore, rows: int, step: int) -> None:
    for first in range(0, rows, BLOCK_ROWS):
        ids = torch.arange(first, min(first + BLOCK_ROWS, rows))
        store.put(ids, {name: torch.rand(len(ids)) for name in store.fields}, step=step)
    store.flush()


PARTS = {
    "budget": Part(budget, BudgetSizes(), BudgetSizes(1_000_000, batch=1024)),
    "epoch": Part(epoch, EpochSizes(), EpochSizes(3, 4096, 2_000, 64, 2, 1.0, 0.0)),
    "snapshot": Part(snapshot, SnapshotSizes(), SnapshotSizes(20_000)),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "icechunk", "moto", "torch")()
