"""Training from an object store: moto's server behind a gateway with latency and a bandwidth limit (object_server.py).

\b
windowed  an order whose windows follow from a cache of a quarter of the dataset
shuffle   a full shuffle, with a cache that holds all of the dataset
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean

import numpy as np
from PIL import Image

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.sources import Sample
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.storage.bucket import Address
from thermopile.trainer.config import DataConfig
from thermopile.trainer.run.build import windows_from
from thermopile.trainer.run.dataset_cache import DatasetCache
from thermopile.trainer.world import ALONE

from .harness import Figure, Measured, Part, script
from .made import PairSource, repeat_shard
from .object_server import Server, object_server, uploaded

STEP_SECONDS = 0.1


@dataclass(frozen=True)
class RemoteSizes:
    """A dataset of equal shards of noise, and how it is read."""

    share: float
    """The cache's share of the dataset."""
    shard_rows: int = 1024
    shards: int = 16
    edge: int = 128
    """Pixels of a picture's side."""
    batch: int = 64
    epochs: int = 2
    latency: float = 0.02
    bytes_per_second: float = 200e6
    failing: float = 0.0
    """Share of requests that the gateway fails."""


class Noise(PairSource):
    """Pictures that hardly compress, as photographs of their bytes."""

    def __init__(self, samples: int, edge: int) -> None:
        super().__init__(samples)
        self._edge = edge

    def __getitem__(self, index: int) -> Sample:
        pixels = np.random.default_rng(index).integers(0, 256, (self._edge, self._edge, 3), dtype=np.uint8)
        return super().__getitem__(index)._replace(picture=Image.fromarray(pixels))


def train(sizes: RemoteSizes, directory: Path) -> Measured:
    """Read the epochs of a run with steps that only sleep."""
    os.environ["THERMOPILE_CACHE"] = str(directory / "cache")
    local = directory / "dataset"
    convert(Noise(sizes.shard_rows, sizes.edge), local, ConvertSettings(), workers=1)
    total = sample_bytes(repeat_shard(local, sizes.shards))
    with object_server() as server:
        address = uploaded(local, Address("bucket", "dataset"))
        with server.gateway(sizes.latency, sizes.bytes_per_second, sizes.failing) as gateway:
            return _measured(sizes, address, gateway, total)


def _measured(sizes: RemoteSizes, address: Address, gateway: Server, total: int) -> Measured:
    began = time.perf_counter()
    dataset = Dataset(address)
    files = dataset.files
    cache = DatasetCache.of(DataConfig(cache=int(total * sizes.share)), dataset, ALONE)
    assert cache is not None
    order = Order.for_memory(min(cache.rows, dataset.n), dataset.n, sizes.batch)
    assert cache.needed(order) <= cache.limit
    first_windows = max(window.last_step for window in islice(order.windows(0), order.canonical_shards))
    bytes_of_epochs, on_disk, step = [], 0, 0
    first_batch = data_wait = fetch_wait = 0.0
    with (
        FFCVLoader(dataset, order, recipe=RECIPES["clip"], image_size=32, views=1) as loader,
        files.expect(windows_from(0, order, sizes.epochs), order, cache.limit),
    ):
        for epoch in range(sizes.epochs):
            before = gateway.stats()["bytes"]
            batches = loader.epoch(epoch)
            while True:
                waited, fetching = time.perf_counter(), files.seconds_waited()
                if next(batches, None) is None:
                    break
                wait, fetch = time.perf_counter() - waited, files.seconds_waited() - fetching
                first_batch = first_batch or time.perf_counter() - began
                step += 1
                files.finished(step)
                if step > first_windows + 1:
                    fetch_wait += min(fetch, wait)
                    data_wait += wait - min(fetch, wait)
                if step % 10 == 0:
                    on_disk = max(on_disk, disk_bytes(dataset.path))
                time.sleep(STEP_SECONDS)
            bytes_of_epochs.append((gateway.stats()["bytes"] - before) / total)
    slept = STEP_SECONDS * (step - first_windows - 1)
    return Measured(
        f"{dataset.n:,} pairs in {dataset.shards} shards, {total / 1e6:,.0f} MB; cache of {sizes.share:.0%}, "
        f"windows of {order.window_blocks} of {order.blocks_per_shard} blocks of {order.block_rows} rows in "
        f"{order.canonical_shards} shards; batches of {sizes.batch}, steps of {STEP_SECONDS * 1000:.0f} ms; "
        f"{sizes.latency * 1000:.0f} ms latency, {sizes.bytes_per_second / 1e6:.0f} MB/s, {sizes.failing:.0%} of "
        f"requests failing; waits after step {first_windows + 2}",
        "",
        [
            Figure("bytes", "bytes fetched in an epoch / dataset's, mean", "", mean(bytes_of_epochs), at_most=1.05),
            Figure("data_wait", "data wait / step", "", data_wait / slept),
            Figure("fetch_wait", "fetch wait / step", "", fetch_wait / slept),
            Figure("waits", "both", "", (data_wait + fetch_wait) / slept, at_most=0.05),
            Figure("first_batch", "first batch", "s", first_batch),
            Figure("disk", "most bytes on disk / data.cache", "", on_disk / cache.limit, at_most=1.0),
            Figure("floor", "least data.cache for this order / dataset", "", cache.needed(order) / total),
        ],
        notes=[f"epochs: {', '.join(f'{share:.3f}' for share in bytes_of_epochs)} of the dataset's bytes; "
               "the first has what the next one's first window was read ahead; "
               f"{gateway.stats()['requests']:,} requests, {gateway.stats()['failed']:,} failed"],
    )  # fmt: skip


def sample_bytes(dataset: Dataset) -> int:
    """The bytes of all samples, without padding, and of their records."""
    records, length = dataset.records(0), dataset.index.tokenizer.context_length if dataset.index.tokenizer else 0
    return dataset.shards * int((records["jpeg_bytes"] + records["captions"] * 4 * length + 64).sum())


def disk_bytes(folder: Path) -> int:
    """What all files of a folder take on disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


_QUARTER, _WHOLE = RemoteSizes(0.25), RemoteSizes(1.5)
_FEW = {"shard_rows": 128, "shards": 4, "edge": 32, "batch": 16, "epochs": 1}

PARTS = {
    "windowed": Part(train, _QUARTER, replace(_QUARTER, **_FEW)),
    "shuffle": Part(train, _WHOLE, replace(_WHOLE, **_FEW)),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "obstore", "moto", "ffcv", "torch")()
