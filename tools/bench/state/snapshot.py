"""What a snapshot of rows that have all changed takes, and how long it holds the training thread up."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ....pipeline.order import Order
from ....state_store import StateStore
from ....state_store.schema import Schema
from ..figure import Figure
from ..measured import Measured
from ..progress import counted, say
from .alternatives import PlainZarr
from .measured import excess
from .sizes import ROW_FIELDS, SnapshotSizes
from .training import TrainingLoop

_ROWS_CHANGED_AT_ONCE = 65_536


@dataclass(frozen=True)
class _Seconds:
    """One repeat."""

    alone: float
    """A snapshot and os.sync(), with nothing else going on."""
    zarr: float
    """Plain zarr writing as much, and os.sync()."""
    zarr_unsynced: float
    """The same without os.sync()."""
    training: float
    """A snapshot while training goes on, until it is committed."""
    held_up: float
    """What the snapshot call, and the steps' calls into the store meanwhile, took more than in quiet."""
    slowed: float
    """What the whole steps took more than in quiet, the snapshot call included."""


def measure(sizes: SnapshotSizes, directory: Path) -> Measured:
    """Repeat in turn: a snapshot alone, plain zarr, a snapshot while training goes on."""
    order = Order.create(sizes.samples, sizes.batch)
    columns = _columns(sizes.samples)
    megabytes = sum(column.nbytes for column in columns.values()) / 1e6
    say(f"snapshot: making {sizes.samples:,} rows")
    with StateStore.create(
        directory / "state", sizes.samples, ROW_FIELDS, block_rows=order.block_rows, dataset_fingerprint="bench"
    ) as store:
        loop = TrainingLoop(store, order)
        repeats = []
        for _ in counted("snapshot: repeats", sizes.repeats):
            alone = _snapshot_alone(store, loop)
            plain = PlainZarr(directory / "plain", columns, order.block_rows)
            zarr_unsynced, zarr = _until_synced(plain.write)
            shutil.rmtree(directory / "plain")
            training, held_up, slowed = _snapshot_in_training(store, loop, sizes.quiet_steps)
            store.retain(keep_last=1).result()
            repeats.append(_Seconds(alone, zarr, zarr_unsynced, training, held_up, slowed))
    return Measured(
        f"{sizes.samples:,} rows of 6 fields, visits and last_step, all changed: {megabytes:,.0f} MB; "
        f"medians of {sizes.repeats}",
        "plain zarr, the same arrays and chunks, written within the step",
        _figures(repeats, megabytes),
    )


def _figures(repeats: list[_Seconds], megabytes: float) -> tuple[Figure, ...]:
    def middle(name: str) -> float:
        return float(median(getattr(repeat, name) for repeat in repeats))

    return (
        Figure("megabytes_per_second", "written and synced, alone", "MB/s", megabytes / middle("alone"),
               megabytes / middle("zarr"), more_is_better=True, ratio_at_least=0.7),
        Figure("training_megabytes_per_second", "written during training", "MB/s",
               megabytes / middle("training")),
        Figure("held_up_ms", "training thread held up", "ms", middle("held_up") * 1e3,
               middle("zarr_unsynced") * 1e3, at_most=20),
        Figure("held_up_worst_ms", f"held up, worst of {len(repeats)}", "ms",
               max(repeat.held_up for repeat in repeats) * 1e3),
        Figure("slowed_ms", "training slowed, cores shared", "ms", middle("slowed") * 1e3,
               middle("zarr_unsynced") * 1e3),
    )  # fmt: skip


def _columns(samples: int) -> dict[str, npt.NDArray[Any]]:
    # No zeros: zarr writes no chunk that holds its fill value alone.
    schema, random = Schema(ROW_FIELDS), np.random.default_rng(0)
    return {name: random.integers(1, 1 << 20, samples).astype(schema.dtype(name)) for name in schema.columns}


def change_all_rows(store: StateStore, step: int) -> None:
    """Put every row once, and wait until they are written; with temperatures that one can train with."""
    state = {name: 0.1 + 0.5 * torch.rand(_ROWS_CHANGED_AT_ONCE) for name in store.fields}
    for first in range(0, store.samples, _ROWS_CHANGED_AT_ONCE):
        ids = torch.arange(first, min(first + _ROWS_CHANGED_AT_ONCE, store.samples))
        store.put(ids, {name: values[: len(ids)] for name, values in state.items()}, step=step)
    store.flush()


def _snapshot_alone(store: StateStore, loop: TrainingLoop) -> float:
    loop.step()  # a snapshot needs a step after the last one's
    change_all_rows(store, loop.steps_done)
    return _until_synced(lambda: store.snapshot(loop.steps_done, epoch=0).result())[1]


def _snapshot_in_training(store: StateStore, loop: TrainingLoop, quiet_steps: int) -> tuple[float, float, float]:
    """Seconds until the snapshot is committed, held up, and slowed."""
    change_all_rows(store, loop.steps_done)
    loop.step()  # the change made its prefetched rows stale
    os.sync()
    quiet = [loop.step() for _ in range(quiet_steps)]
    began = time.perf_counter()
    snapshot = store.snapshot(loop.steps_done, epoch=0)
    called = time.perf_counter() - began
    during = [loop.step()]
    while not snapshot.done():
        during.append(loop.step())
    seconds = time.perf_counter() - began
    snapshot.result()
    held_up = called + excess([step.store for step in during], [step.store for step in quiet])
    slowed = called + excess([step.whole for step in during], [step.whole for step in quiet])
    return seconds, held_up, slowed


def _until_synced(write: Callable[[], object]) -> tuple[float, float]:
    """Seconds that `write` takes, without os.sync() after it and with it."""
    os.sync()  # what others left to write would count as ours
    began = time.perf_counter()
    write()
    written = time.perf_counter() - began
    os.sync()
    return written, time.perf_counter() - began
