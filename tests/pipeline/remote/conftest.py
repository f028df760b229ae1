"""A dataset of several shards, on disk and in an object store."""

import pytest

from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.storage.bucket import Address
from thermopile.trainer.config import DataConfig
from thermopile.trainer.run.dataset_cache import DatasetCache
from thermopile.trainer.world import ALONE


@pytest.fixture(scope="session")
def local(noise_dataset) -> Dataset:
    """The dataset on disk."""
    return noise_dataset


@pytest.fixture(scope="module")
def address(s3, local) -> Address:
    """The dataset's place in the object store."""
    return uploaded(local.path, Address("bucket", "noise"))


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def sample_bytes(local) -> int:
    """Bytes of all samples and of their records, without the files' padding."""
    records = [local.records(shard) for shard in range(local.shards)]
    tokens = 4 * local.index.tokenizer.context_length
    return sum(int(each["jpeg_bytes"].sum() + each["captions"].sum() * tokens) + 64 * len(each) for each in records)


@pytest.fixture
def planned():
    """Return a function (dataset, cache bytes) -> order and the cache that it was made for, as training does."""

    def plan(dataset: Dataset, limit: int, batch_size: int = 64) -> tuple[Order, DatasetCache]:
        cache = DatasetCache.of(DataConfig(cache=limit), dataset, ALONE)
        rows = min(cache.rows, dataset.n)
        first = Order.for_memory(rows, dataset.n, batch_size)
        order = Order.for_memory(cache.narrowed(first, rows), dataset.n, batch_size)
        cache.check(order, order)
        return order, cache

    return plan
