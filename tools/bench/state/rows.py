"""What it takes to read and to write a random batch of rows, beside separate tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from ....state_store import StateStore
from ....state_store.schema import Schema
from ..figure import Figure
from ..measured import Measured
from ..progress import counted, say
from .alternatives import SeparateTensors
from .sizes import RowsSizes

_WARM_UP = 3
_BLOCK_ROWS = 65_536


def measure(sizes: RowsSizes, directory: Path) -> Measured:
    """Time both, batch by batch in turn; the store's put counts until its rows are written."""
    samples, fields = sizes.samples, sizes.fields
    say(f"rows: filling {sizes.memory_bytes / 1e9:,.1f} GB of memory")
    tensors = SeparateTensors(samples, fields)
    seconds: dict[str, list[float]] = {"take": [], "put": [], "tensors take": [], "tensors put": []}
    random = np.random.default_rng(0)
    state = {name: torch.rand(sizes.batch) for name in fields}
    with StateStore.create(
        directory / "state", samples, fields, block_rows=_BLOCK_ROWS, dataset_fingerprint="bench"
    ) as store:

        def put_and_flush(ids: torch.Tensor, step: int) -> None:
            store.put(ids, state, step=step)
            store.flush()

        for batch in counted("rows", _WARM_UP + sizes.batches):
            # Other ids for the put: those of a real one were taken a step ago, and the caches have seen much since.
            taken, put = (torch.from_numpy(random_ids(random, samples, sizes.batch)) for _ in range(2))
            seconds["take"].append(_timed(store.take, taken))
            seconds["tensors take"].append(_timed(tensors.take, taken))
            seconds["put"].append(_timed(put_and_flush, put, batch + 1))
            seconds["tensors put"].append(_timed(tensors.put, put, state, step=batch + 1))
    ns = {way: median(times[_WARM_UP:]) / sizes.batch * 1e9 for way, times in seconds.items()}
    return Measured(
        f"take and put of {sizes.batch:,} random of {samples:,} rows, {len(fields)} fields; with visits and last_step "
        f"a row is {Schema(fields).row_words * 4} B; medians of {sizes.batches} batches",
        f"{len(fields)} float32 tensors, indexed and assigned by a tensor of ids",
        (
            Figure("take_ns", "take, a row", "ns", ns["take"], ns["tensors take"], at_most=150),
            Figure("put_ns", "put until written, a row", "ns", ns["put"], ns["tensors put"], at_most=150),
            Figure(
                "take_and_put_ns", "take + put, a row", "ns",
                ns["take"] + ns["put"], ns["tensors take"] + ns["tensors put"], ratio_at_least=8,
            ),
        ),
    )  # fmt: skip


def random_ids(random: np.random.Generator, samples: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """`count` distinct ids below `samples` in random order, int64 [count], without a permutation of them all."""
    ids = np.unique(random.integers(samples, size=count))
    while len(ids) < count:
        ids = np.unique(np.concatenate([ids, random.integers(samples, size=count - len(ids))]))
    random.shuffle(ids)
    return ids


def _timed(call: Callable[..., object], *arguments: object, **named: object) -> float:
    began = time.perf_counter()
    call(*arguments, **named)
    return time.perf_counter() - began
