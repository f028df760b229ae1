"""What it takes to open a dataset of many rows: time, and memory above the mapped files."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from ....pipeline.augment import RECIPES
from ....pipeline.beton import BetonRow, write_beton
from ....pipeline.dali_loader import DALILoader
from ....pipeline.dataset import FORMAT, INDEX_FILE, SHARD_FOLDER, Dataset, ImagePolicy, fingerprint, shard_name
from ....pipeline.ffcv_loader import FFCVLoader
from ....pipeline.order import Order
from ....pipeline.shard_writer import TABLE_SCHEMA
from ..figure import Figure
from ..machine import anonymous_memory, peak_anonymous_memory, reset_peak_memory
from ..measured import Measured
from ..progress import say
from .sizes import OpenSizes

_SIDE = 16
"""Of the tiny picture, in pixels."""
_LOADERS: dict[str, Callable[..., AbstractContextManager[object]]] = {"ffcv": FFCVLoader.open, "dali": DALILoader.open}


def measure(sizes: OpenSizes, directory: Path) -> Measured:
    """Open a small dataset for all that is done once in a process, then the large one, with each loader."""
    say(f"open: writing {sizes.shards * sizes.rows:,} rows")
    small, large = directory / "small", directory / "large"
    _write_dataset(small, 1, 64)
    _write_dataset(large, sizes.shards, sizes.rows)
    figures: list[Figure] = []
    with ExitStack() as held:  # to the end: memory freed would be taken again unseen
        for name in _LOADERS:
            _open(name, small, held)
            opened = _open(name, large, held)
            figures += [
                Figure(f"{name}_seconds", f"{name}: dataset and loader open", "s", opened.seconds, at_most=2),
                Figure(
                    f"{name}_megabytes",
                    f"{name}: memory taken, beside mapped files",
                    "MB",
                    opened.bytes / 1e6,
                    at_most=200,
                ),
                Figure(
                    f"{name}_peak_megabytes",
                    f"{name}: the most while opening",
                    "MB",
                    opened.peak_bytes / 1e6,
                    at_most=200,
                ),
            ]
    return Measured(
        f"{sizes.shards * sizes.rows:,} rows in {sizes.shards} shards, in the page cache; what a process does once is "
        "not counted",
        "none",
        tuple(figures),
    )  # fmt: skip


class _Opened(NamedTuple):
    seconds: float
    bytes: int
    peak_bytes: int


def _open(name: str, path: Path, held: ExitStack) -> _Opened:
    """How long it takes until the dataset and a loader of it are open, and the memory that they take."""
    before = anonymous_memory()
    reset_peak_memory()
    began = time.perf_counter()
    dataset = Dataset(path)
    order = Order.create(dataset.n, batch_size=16)
    loader = _LOADERS[name](dataset, order, recipe=RECIPES["crop_flip"], image_size=32, views=2, workers=1)
    seconds = time.perf_counter() - began
    held.enter_context(loader)
    return _Opened(seconds, anonymous_memory() - before, peak_anonymous_memory() - before)


def _write_dataset(path: Path, shards: int, rows: int) -> None:
    """A dataset whose shards are links to one file."""
    folder = path / SHARD_FOLDER
    beton, parquet = folder / shard_name(0, "beton"), folder / shard_name(0, "parquet")
    folder.mkdir(parents=True)
    write_beton(beton, _rows(rows), most_rows=rows, context_length=None)
    texts = [f"{row:08d}" for row in range(rows)]
    sides = [_SIDE] * rows
    columns = [range(rows), texts, texts, [None] * rows, [None] * rows, sides, sides]
    pq.write_table(pa.table(dict(zip(TABLE_SCHEMA.names, columns, strict=True)), TABLE_SCHEMA), parquet)
    for shard in range(1, shards):
        os.link(beton, folder / shard_name(shard, "beton"))
        os.link(parquet, folder / shard_name(shard, "parquet"))
    index: dict[str, Any] = {
        "format": FORMAT, "n": shards * rows, "mode": "images",
        "first_id": [shard * rows for shard in range(shards + 1)],
        "image": ImagePolicy().model_dump(), "tokenizer": None, "source": {"kind": "bench"},
        "shard_digests": ["0" * 64] * shards,
    }  # fmt: skip
    index["fingerprint"] = fingerprint(index)
    (path / INDEX_FILE).write_text(json.dumps(index), "utf-8")


def _rows(count: int) -> Iterator[BetonRow]:
    file = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE)).save(file, "JPEG")
    for row in range(count):
        yield BetonRow(file.getvalue(), _SIDE, _SIDE, None, row)
