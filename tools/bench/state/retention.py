"""How much disk a long row of snapshots takes when all but the newest few are deleted."""

from __future__ import annotations

from pathlib import Path

from ....pipeline.order import Order
from ....state_store import StateStore
from ..figure import Figure
from ..machine import disk_used
from ..measured import Measured
from ..progress import counted
from .sizes import ROW_FIELDS, RetentionSizes
from .snapshot import change_all_rows


def measure(sizes: RetentionSizes, directory: Path) -> Measured:
    """Change all rows, make a snapshot, delete the old ones, over and over; look at the disk after every write."""
    state = directory / "state"
    block_rows = Order.create(sizes.samples, batch_size=256).block_rows
    used = []
    with StateStore.create(
        state, sizes.samples, ROW_FIELDS, block_rows=block_rows, dataset_fingerprint="bench"
    ) as store:
        for number in counted("retention: snapshots", sizes.snapshots):
            change_all_rows(store, step=number + 1)
            store.snapshot(number + 1, epoch=0).result()
            used.append(disk_used(state))
            store.retain(sizes.keep_last).result()
    one = used[0]
    return Measured(
        f"{sizes.snapshots} snapshots of {sizes.samples:,} rows of 32 B, all changed ({one / 1e6:,.0f} MB each), the "
        f"newest {sizes.keep_last} kept",
        "every snapshot kept",
        (Figure("peak_disk", "most disk, in snapshots", "×", max(used) / one, float(sizes.snapshots), at_most=5),),
    )
