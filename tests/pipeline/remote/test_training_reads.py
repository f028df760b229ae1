"""A training's reading from an object store: the local pixels, each byte once, within the cache, whatever fails."""

import gc
import threading
import time

import numpy as np
import pytest

from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order, Served
from thermopile.pipeline.remote.room import CacheTooSmallError
from thermopile.storage import bucket
from thermopile.storage.bucket_errors import ObjectStoreError
from thermopile.storage.selection import IDS, WITHOUT, Selection, SelectionWriter
from thermopile.trainer.config import DataConfig
from thermopile.trainer.run.dataset_cache import DatasetCache
from thermopile.trainer.world import ALONE

from support.remote_reading import assert_same, on_disk, reading

pytestmark = pytest.mark.wide


@pytest.mark.parametrize("name", ["ffcv", "dali"])
def test_windows_of_a_quarter_give_the_local_pixels_and_fetch_each_byte_once(
    s3, address, local, sample_bytes, planned, name
):
    with s3.gateway() as gateway:
        dataset = Dataset(address)
        order, cache = planned(dataset, int(dataset.files.beton_bytes().sum()) // 4)
        assert order.window_blocks < order.blocks_per_shard
        before, epochs = gateway.stats()["bytes"], 3
        peaks = []
        assert_same(dataset, local, order, cache.limit, epochs=epochs, name=name,
                    after=lambda step: peaks.append(on_disk(dataset)))  # fmt: skip
        fetched = gateway.stats()["bytes"] - before
    assert fetched <= 1.05 * sample_bytes * epochs
    assert fetched >= 0.5 * sample_bytes * epochs, "the cache of a quarter has kept too much"
    assert max(peaks) <= cache.limit


def test_a_full_shuffle_begins_at_once_and_fetches_each_byte_once_in_all_epochs(s3, address, local, sample_bytes):
    with s3.gateway() as gateway:
        dataset, order = Dataset(address), Order.create(local.n, 64)
        before, first = gateway.stats()["bytes"], []
        assert_same(dataset, local, order, 1 << 30, epochs=2,
                    after=lambda step: step == 1 and first.append(dataset.files.room.bytes))  # fmt: skip
        assert gateway.stats()["bytes"] - before <= 1.05 * sample_bytes
    assert dataset.files.seconds_waited() > 0


@pytest.fixture
def selected(local, tmp_path):
    """Return a function that selects every k-th sample and makes the order for a memory of so many rows."""

    def select(every, rows, without=()):
        chosen = np.arange(1, local.n, every)
        with SelectionWriter(tmp_path / "selection", local.n) as writer:
            writer.add(IDS, [chosen])
            if len(without):
                writer.add(WITHOUT, [without])
            writer.finish()
        order = Order.for_memory(rows, len(chosen), 64)
        return Served(order, Selection(tmp_path / "selection"), local.n)

    return select


def test_an_order_of_selected_samples_is_read_ahead_and_only_those_are_fetched(
    s3, address, local, sample_bytes, selected
):
    order = selected(4, 700)
    assert order.order.window_blocks < order.order.blocks_per_shard
    with s3.gateway() as gateway:
        dataset = Dataset(address)
        before = gateway.stats()["bytes"]
        assert_same(dataset, local, order, 12 << 20)
        assert gateway.stats()["bytes"] - before < 0.5 * sample_bytes


@pytest.mark.parametrize("name", ["ffcv", "dali"])
def test_holes_are_neither_read_ahead_nor_served(s3, address, local, sample_bytes, selected, name):
    rows = selected(1, 700).order.block_rows
    holes = np.arange(local.n - 1)
    order = selected(1, 700, holes[(holes < rows) | (holes % 4 > 0)])  # a whole block, and three of four others
    with s3.gateway() as gateway:
        dataset = Dataset(address)
        before = gateway.stats()["bytes"]
        assert_same(dataset, local, order, 12 << 20, name=name)
        assert gateway.stats()["bytes"] - before < 0.5 * sample_bytes


@pytest.mark.parametrize(("every", "rows"), [(4, 4096), (4, 700), (16, 4096)])
def test_selected_samples_go_through_a_cache_of_what_their_order_needs(address, local, selected, every, rows):
    dataset, order = Dataset(address), selected(every, rows)
    needed = DatasetCache.of(DataConfig(cache=1), dataset, ALONE).needed(order.order)
    peaks = []
    assert_same(dataset, local, order, needed, epochs=2, after=lambda step: peaks.append(on_disk(dataset)))
    assert max(peaks) <= needed


def test_a_store_that_fails_one_request_in_twenty_changes_nothing(s3, address, local, planned):
    with s3.gateway(failing=0.05) as gateway:
        dataset = Dataset(address)
        order, cache = planned(dataset, int(dataset.files.beton_bytes().sum()) // 4)
        assert_same(dataset, local, order, cache.limit)
        assert gateway.stats()["failed"] > 0


def test_a_training_waits_for_a_store_that_is_away_for_a_while(s3, address, local, planned):
    with s3.gateway() as gateway:
        dataset = Dataset(address)
        order, cache = planned(dataset, int(dataset.files.beton_bytes().sum()) // 4)

        def outage(step):
            if step == 5:
                gateway.stop()
                threading.Timer(4, gateway.start).start()

        assert_same(dataset, local, order, cache.limit, after=outage)
    assert dataset.files.seconds_waited() > 1


def test_a_store_away_for_longer_ends_the_reading_with_one_error_that_names_it(
    s3, address, local, planned, monkeypatch
):
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 2)
    with s3.gateway() as gateway:
        dataset = Dataset(address)
        order, cache = planned(dataset, int(dataset.files.beton_bytes().sum()) // 4)
        began = []

        def outage(step):
            if step == 5:
                gateway.stop()
                began.append(time.monotonic())

        with pytest.raises(ObjectStoreError, match=r"s3://bucket/noise/shards/shard-.* cannot be used"):
            assert_same(dataset, local, order, cache.limit, after=outage)
        assert time.monotonic() - began[0] < 60
        gateway.start()
        again = Dataset(address)
        assert_same(again, local, order, cache.limit)


def test_an_object_that_was_changed_ends_the_reading_and_gives_no_wrong_pixels(s3, address, local, planned):
    shard = address / "shards" / "shard-00001.beton"
    sound = (local.path / "shards" / "shard-00001.beton").read_bytes()
    dataset = Dataset(address)
    order, cache = planned(dataset, int(dataset.files.beton_bytes().sum()) // 4)
    at = int(local.records(1)["jpeg_at"][100]) + 50
    shard.write(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
    try:
        damaged = int(local.first_id[1]) + 100
        with pytest.raises(
            DatasetError, match=rf"sample {damaged} \(row 100 of shard 1 of s3://bucket/noise\) changed"
        ):
            assert_same(dataset, local, order, cache.limit)
    finally:
        shard.write(sound)


def test_a_cache_too_small_for_a_batch_is_an_error_with_the_bytes_that_it_takes(address, local):
    dataset, order = Dataset(address), Order.create(local.n, 64)
    with (
        pytest.raises(CacheTooSmallError, match=r"data.cache = 300,000 is too small"),
        reading(dataset, order, 300_000) as loader,
    ):
        next(loader.epoch(0))


def test_a_cache_goes_with_its_dataset(address, local, planned, cache_root):
    dataset = Dataset(address)
    order, cache = planned(dataset, int(dataset.files.beton_bytes().sum()) // 4)
    with reading(dataset, order, cache.limit) as loader:
        next(loader.epoch(0))
    assert len(list(cache_root.iterdir())) == 2
    del dataset, loader
    deadline = time.monotonic() + 60
    while list(cache_root.iterdir()) and time.monotonic() < deadline:  # requests under way end by themselves
        gc.collect()
        time.sleep(0.1)
    assert list(cache_root.iterdir()) == []
