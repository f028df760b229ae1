"""The state store beside what one would use instead: separate tensors, plain zarr, or all rows in memory.

\b
rows       take and put of random rows, beside a torch tensor for each field
windowed   an epoch through rows that do not fit their memory: peak memory, waiting, blocks read and written
snapshot   a snapshot of rows that have all changed, beside plain zarr
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zarr
from torch import Tensor

from thermopile.pipeline.order.order import Order, Window
from thermopile.state_store.schema import Schema
from thermopile.state_store.store import StateStore

from .harness import Figure, Measured, Part, counted, peak_memory, script, take_turns, timed

FIELDS = {f"{side}/{name}": value for side in ("image", "text")
          for name, value in (("log_s", float("-inf")), ("tau", 0.05), ("u", 0.0))}  # fmt: skip
"""State of an image-text pair."""
ROW_BYTES = Schema(FIELDS).row_words * 4
"""With visits and last_step: 32."""


MAX_ROW_NS = 90
"""Twice the 45 ns or so of one cache miss; a row lies in one cache line."""


@dataclass(frozen=True)
class RowsSizes:
    """Random batches of rows of 8 fields; with visits and last_step, a row is 64 B."""

    samples: int = 10**8
    batch: int = 4096
    batches: int = 400


def rows(sizes: RowsSizes, directory: Path) -> Measured:
    """Time both, batch by batch in turn; the store's put counts until its rows are written."""
    fields, warm_up, random = {f"field_{number}": 0.01 for number in range(8)}, 3, np.random.default_rng(0)
    # Filled, not zeroed: untouched zero pages all share one page of memory, which would be read from the cache.
    tensors = {name: torch.full((sizes.samples,), value) for name, value in fields.items()}
    state = {name: torch.rand(sizes.batch) for name in fields}
    took: dict[str, list[float]] = {"take": [], "put": [], "tensors take": [], "tensors put": []}
    with StateStore.create(
        directory / "state", sizes.samples, fields, block_rows=65_536, dataset_fingerprint="benchmark"
    ) as store:

        def put_and_flush(ids: Tensor, step: int) -> None:
            store.put(ids, state, step=step)
            store.flush()

        def put_into_tensors(ids: Tensor) -> None:
            for name, tensor in tensors.items():
                tensor[ids] = state[name]

        for batch in counted("rows", warm_up + sizes.batches):
            # Other ids for the put: those of a real one were taken a step ago, and the caches have seen much since.
            taken, put = (torch.from_numpy(_distinct(random, sizes.samples, sizes.batch)) for _ in range(2))
            took["take"].append(timed(store.take, taken))
            took["tensors take"].append(
                timed(lambda ids: {name: tensor[ids] for name, tensor in tensors.items()}, taken)
            )
            took["put"].append(timed(put_and_flush, put, batch + 1))
            took["tensors put"].append(timed(put_into_tensors, put))
    ns = {way: median(seconds[warm_up:]) / sizes.batch * 1e9 for way, seconds in took.items()}
    return Measured(
        f"take and put of {sizes.batch:,} random of {sizes.samples:,} rows, {len(fields)} fields; with visits and "
        f"last_step a row is {Schema(fields).row_words * 4} B; medians of {sizes.batches} batches",
        f"{len(fields)} float32 tensors, indexed and assigned by a tensor of ids",
        (
            Figure("take_ns", "take, a row", "ns", ns["take"], ns["tensors take"], at_most=MAX_ROW_NS,
                   ratio_at_least=1),
            Figure("put_ns", "put until written, a row", "ns", ns["put"], ns["tensors put"], at_most=MAX_ROW_NS,
                   ratio_at_least=1),
        ),
    )  # fmt: skip


def _distinct(random: np.random.Generator, samples: int, wanted: int) -> npt.NDArray[np.int64]:
    """`wanted` distinct ids below `samples` in random order, int64, without a permutation of them all."""
    ids = np.unique(random.integers(samples, size=wanted))
    while len(ids) < wanted:
        ids = np.unique(np.concatenate([ids, random.integers(samples, size=wanted - len(ids))]))
    random.shuffle(ids)
    return ids


@dataclass(frozen=True)
class WindowedSizes:
    """Two epochs through a window, the first as fast as it goes, the second with a step of `step_ms`."""

    samples: int = 2 * 10**8
    budget_mb: float = 512.0
    batch: int = 16_384
    step_ms: float = 50.0


def windowed(sizes: WindowedSizes, directory: Path) -> Measured:
    """In the second epoch every block has to be read."""
    budget = int(sizes.budget_mb * 1e6)
    order = Order.for_memory(budget // ROW_BYTES, sizes.samples, sizes.batch)
    blocks = order.canonical_shards * order.blocks_per_shard
    with StateStore.create(
        directory / "state", sizes.samples, FIELDS, block_rows=order.block_rows, dataset_fingerprint="benchmark",
        memory_budget=budget,
    ) as store:  # fmt: skip
        store.expect(_windows(order))
        _pass_epoch(store, order, 0, step_ms=0.0)
        read, written = store.blocks_read, store.blocks_written
        waited, whole = _pass_epoch(store, order, 1, sizes.step_ms)
        read, written = store.blocks_read - read, store.blocks_written - written
    return Measured(
        f"second epoch of {order.steps_per_epoch:,} steps of {sizes.step_ms:g} ms through {sizes.samples:,} rows "
        f"of {ROW_BYTES} B in {sizes.budget_mb:g} MB, batch {sizes.batch:,}; {blocks:,} blocks of {order.block_rows:,} "
        f"rows, window {order.window_blocks}",
        "all rows in memory, and nothing else",
        (
            Figure("peak_memory_gb", "peak memory", "GB", peak_memory() / 1e9, sizes.samples * ROW_BYTES / 1e9,
                   at_most=1.2),
            Figure("wait_percent", "waiting for the store", "%", 100 * waited / whole, at_most=5),
            Figure("blocks_read", "blocks read, of all", "×", read / blocks),
            Figure("blocks_written", "blocks written back, of all", "×", written / blocks),
        ),
    )  # fmt: skip


def _windows(order: Order) -> Iterator[Window]:
    """The windows of epoch 0, 1 and so on without end; the first put is step 1."""
    for epoch in count():
        first = epoch * order.steps_per_epoch + 1
        for window in order.windows(epoch):
            yield replace(window, first_step=first + window.first_step, last_step=first + window.last_step)


def _pass_epoch(store: StateStore, order: Order, epoch: int, step_ms: float) -> tuple[float, float]:
    """Take and put every batch of an epoch, with rows two steps ahead prefetched, and sleep for `step_ms` between.

    Return the seconds in which the calls into the store held the steps up, and those of the whole epoch.
    """

    def ids_of(step: int) -> Tensor:
        return torch.from_numpy(order.batch_ids(*divmod(step, order.steps_per_epoch)))

    first, waited, began = epoch * order.steps_per_epoch, 0.0, time.perf_counter()
    ahead = [ids_of(first), ids_of(first + 1)]
    for ids in ahead:
        store.prefetch(ids)
    # Values other than those taken: a sample's initial log_s is -inf, which no step makes.
    state = {name: torch.rand(order.batch_size) for name in store.fields}
    for step in counted(f"windowed: epoch {epoch + 1}", order.steps_per_epoch):
        ahead.append(ids_of(first + step + 2))
        ids = ahead.pop(0)
        waited += timed(store.take, ids) + timed(store.prefetch, ahead[-1])
        time.sleep(step_ms / 1e3)
        waited += timed(store.put, ids, state, step=first + step + 1)
    return waited, time.perf_counter() - began


@dataclass(frozen=True)
class SnapshotSizes:
    """Snapshots of rows that have all changed."""

    samples: int = 10**7
    repeats: int = 5


def snapshot(sizes: SnapshotSizes, directory: Path) -> Measured:
    """Write all rows as a snapshot and by plain zarr in turn, each until it is on the disk."""
    # No zeros: zarr writes no chunk that holds its fill value alone.
    schema, random = Schema(FIELDS), np.random.default_rng(0)
    columns = {name: random.integers(1, 1 << 20, sizes.samples).astype(schema.dtype(name)) for name in schema.columns}
    megabytes = sum(column.nbytes for column in columns.values()) / 1e6
    block_rows = Order.create(sizes.samples, batch_size=256).block_rows
    with StateStore.create(
        directory / "state", sizes.samples, FIELDS, block_rows=block_rows, dataset_fingerprint="benchmark"
    ) as store:

        def by_store(number: int) -> float:
            _change_all(store, step=number + 1)
            seconds = _synced_seconds(lambda: store.snapshot(number + 1, epoch=0).result())
            store.retain(keep_last=1).result()
            return seconds

        def by_zarr(number: int) -> float:
            path = directory / "plain"
            seconds = _synced_seconds(lambda: _write_arrays(path, columns, block_rows))
            shutil.rmtree(path)
            return seconds

        seconds = take_turns("snapshot", {"store": by_store, "zarr": by_zarr}, sizes.repeats)
    rates = {name: [megabytes / of_round for of_round in times] for name, times in seconds.items()}
    return Measured(
        f"{sizes.samples:,} rows of 6 fields, visits and last_step, all changed: {megabytes:,.0f} MB; medians of "
        f"{sizes.repeats}",
        "plain zarr, the same arrays and chunks",
        [Figure.of_rounds("megabytes_per_second", "written and synced", "MB/s", rates["store"], rates["zarr"],
                          more_is_better=True, ratio_at_least=0.7)],
    )  # fmt: skip


def _synced_seconds(write: Callable[[], object]) -> float:
    os.sync()  # what others left to write would count as ours
    return timed(write) + timed(os.sync)


def _write_arrays(path: Path, columns: Mapping[str, npt.NDArray[Any]], chunk_rows: int) -> None:
    """Write a zarr array for each column, uncompressed."""
    group = zarr.create_group(path)
    for name, column in columns.items():
        shape, dtype = column.shape, column.dtype
        array = group.create_array(name, shape=shape, chunks=(chunk_rows,), dtype=dtype, compressors=None, filters=None)
        array[:] = column


def _change_all(store: StateStore, step: int) -> None:
    """Put every row once, and wait until all are written."""
    state = {name: torch.rand(65_536) for name in store.fields}
    for first in range(0, store.samples, 65_536):
        ids = torch.arange(first, min(first + 65_536, store.samples))
        store.put(ids, {name: values[: len(ids)] for name, values in state.items()}, step=step)
    store.flush()


PARTS = {
    "rows": Part(rows, RowsSizes(), RowsSizes(10**5, 512, 10)),
    "windowed": Part(windowed, WindowedSizes(), WindowedSizes(4_000, 0.08, 64, 1.0)),
    "snapshot": Part(snapshot, SnapshotSizes(), SnapshotSizes(20_000, 1)),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "torch", "zarr", "icechunk")()
