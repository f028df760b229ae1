"""What it takes to open a dataset of many rows: time, and memory above the mapped files."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ....pipeline.augment import RECIPES
from ....pipeline.convert import ConvertSettings, convert
from ....pipeline.dataset import Dataset
from ....pipeline.order import Order
from ..figure import Figure
from ..inspect.pairs import PairSource
from ..isolated import run_isolated
from ..machine import memory_in_use
from ..measured import Measured
from ..progress import say
from ..repeated import repeat_shard
from .first_format import write_first_format
from .sizes import OpenSizes

if TYPE_CHECKING:
    from ....pipeline.dali_loader import DALILoader
    from ....pipeline.ffcv_loader import FFCVLoader


def measure(sizes: OpenSizes, directory: Path) -> Measured:
    """With each loader open a small dataset, for all that is done once in a process, and then the large one."""
    say(f"open: writing a shard of {sizes.rows:,} rows, which stands for all {sizes.shards}")
    small, large = directory / "small", directory / "large"
    convert(PairSource(2 * sizes.batch), small, ConvertSettings())
    convert(PairSource(sizes.rows), large, ConvertSettings())
    repeat_shard(large, sizes.first_format_shards)
    first_format = write_first_format(Dataset(large), directory / "first_format")
    repeat_shard(large, sizes.shards)
    figures: list[Figure] = []
    for name in ("ffcv", "dali"):
        say(f"open: {name}")
        opened = run_isolated(_open_both, name, small, large, sizes)
        figures += [
            Figure(f"{name}_seconds", f"{name}: first batch", "s", opened.seconds, at_most=60),
            Figure(f"{name}_megabytes", f"{name}: memory taken", "MB", opened.bytes / 1e6, at_most=200),
            Figure(f"{name}_process_megabytes", f"{name}: memory of its process", "MB", opened.process_bytes / 1e6,
                   at_most=1000),
        ]  # fmt: skip
    seconds = _seconds_to_check(first_format)
    figures.append(Figure("format_1_seconds", f"{first_format.n:,} rows of format 1 checked", "s", seconds, at_most=2))
    return Measured(
        f"{sizes.shards * sizes.rows:,} rows in {sizes.shards} shards, in the page cache, fully shuffled; after "
        f"{sizes.batches} batches of {sizes.batch}, each loader in a fresh process; what a process does once is not "
        "counted in the first two",
        "none",
        tuple(figures),
    )


class _Opened(NamedTuple):
    seconds: float
    bytes: int
    process_bytes: int


def _open_both(name: str, small: Path, large: Path, sizes: OpenSizes) -> _Opened:
    """Open the small dataset, and then the large one."""
    with ExitStack() as held:  # to the end: memory freed would be taken again unseen
        _open(name, small, replace(sizes, batches=1), held)
        return _open(name, large, sizes, held)


def _open(name: str, path: Path, sizes: OpenSizes, held: ExitStack) -> _Opened:
    """How long it takes from nothing to the first batch, and the memory taken after some batches."""
    before = memory_in_use()
    began = time.perf_counter()
    dataset = Dataset(path)
    order = Order.create(dataset.n, sizes.batch)
    loader = _loader(name).open(dataset, order, recipe=RECIPES["clip"], image_size=32, views=1)
    held.enter_context(loader)
    batches = loader.epoch(0)
    next(batches)
    seconds = time.perf_counter() - began
    for _ in range(sizes.batches - 1):
        next(batches)
    return _Opened(seconds, memory_in_use() - before, memory_in_use())


def _loader(name: str) -> type[FFCVLoader | DALILoader]:
    """Import one of the loaders, and not the other: it would count as memory of the process."""
    if name == "ffcv":
        from ....pipeline.ffcv_loader import FFCVLoader

        return FFCVLoader
    from ....pipeline.dali_loader import DALILoader

    return DALILoader


def _seconds_to_check(dataset: Dataset) -> float:
    """How long all shards take to open for the first time."""
    dataset.shard(0)  # the checks are compiled once
    again = Dataset(dataset.path)
    began = time.perf_counter()
    for shard in range(again.shards):
        again.shard(shard)
    return time.perf_counter() - began
