"""Two epochs through a store whose rows do not fit its memory: peak memory, waiting, blocks read and written."""

from __future__ import annotations

from pathlib import Path

from ....pipeline.order import Order
from ....state_store import StateStore
from ..figure import Figure
from ..machine import peak_memory
from ..measured import Measured
from .epochs import expected_windows, pass_epoch
from .measured import store_share
from .sizes import ROW_BYTES, ROW_FIELDS, WindowedSizes


def measure(sizes: WindowedSizes, directory: Path) -> Measured:
    """The first epoch as fast as it goes; the second, in which every block has to be read, with a step to wait for."""
    order = Order.for_memory(sizes.budget_bytes // ROW_BYTES, sizes.samples, sizes.batch)
    blocks = order.canonical_shards * order.blocks_per_shard
    with StateStore.create(
        directory / "state", sizes.samples, ROW_FIELDS, block_rows=order.block_rows, dataset_fingerprint="bench",
        memory_budget=sizes.budget_bytes,
    ) as store:  # fmt: skip
        store.expect(expected_windows(order))
        first = pass_epoch("windowed: first epoch", store, order, epoch=0)
        read, written = store.blocks_read, store.blocks_written
        second = pass_epoch("windowed: second epoch", store, order, epoch=1, step_ms=sizes.step_ms)
        read, written = store.blocks_read - read, store.blocks_written - written
    return Measured(
        f"second epoch of {len(second):,} steps of {sizes.step_ms:g} ms through {sizes.samples:,} rows of 32 B in "
        f"{sizes.budget_mb:g} MB, batch {sizes.batch:,}; {blocks:,} blocks of {order.block_rows:,} rows, "
        f"window {order.window_blocks}",
        "all rows in memory, and nothing else",
        (
            Figure("peak_memory_gb", "peak memory", "GB", peak_memory() / 1e9, sizes.samples * ROW_BYTES / 1e9,
                   at_most=1.2),
            Figure("wait_percent", "waiting for the store", "%", store_share(second), at_most=5),
            Figure("first_wait_percent", "waiting, first epoch, no step", "%",
                   store_share(first)),
            Figure("first_step_ms", "step of the first epoch", "ms", 1e3 * sum(s.whole for s in first) / len(first)),
            Figure("blocks_read", "blocks read, of all", "×", read / blocks),
            Figure("blocks_written", "blocks written back, of all", "×", written / blocks),
        ),
    )  # fmt: skip
