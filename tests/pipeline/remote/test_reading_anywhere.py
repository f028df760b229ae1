"""A dataset at an address read without an order: what local readers see, a little disk, and every damage found."""

import json
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.conversion.check import check_dataset
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.loading.ffcv_loader import ViewMaker
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.remote import samples as samples_module
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.storage.bucket import Address
from thermopile.storage.bucket_errors import ObjectStoreError

from support.remote_reading import cached_bytes

pytestmark = pytest.mark.wide

IDS = np.array([4095, 7, 0, 1023, 1024, 7, 2500])


def test_pictures_tables_tokenizer_and_records_are_the_local_ones(address, local):
    dataset = Dataset(str(address))
    assert dataset.n == local.n
    assert [dataset.jpeg(int(id)) for id in IDS] == [local.jpeg(int(id)) for id in IDS]
    assert dataset.rows(IDS.tolist()) == local.rows(IDS.tolist())
    assert dataset.column("caption") == local.column("caption")
    assert dataset.tokenizer_path.read_bytes() == local.tokenizer_path.read_bytes()
    np.testing.assert_array_equal(dataset.records(2), local.records(2))


def test_views_are_the_local_ones(address, local):
    with (
        ViewMaker(Dataset(address), recipe=RECIPES["simclr"], image_size=32, views=2) as ours,
        ViewMaker(local, recipe=RECIPES["simclr"], image_size=32, views=2) as theirs,
    ):
        for ids in (IDS, np.arange(500, 1500)):
            for view, expected in zip(ours.make(ids, 3).views, theirs.make(ids, 3).views, strict=True):
                np.testing.assert_array_equal(view, expected)


def test_a_few_pictures_fetch_little_more_than_themselves(s3, address, local):
    with s3.gateway() as gateway:
        dataset = Dataset(address)
        before = gateway.stats()["bytes"]
        pictures = [dataset.jpeg(id) for id in (0, 2000)]
        assert gateway.stats()["bytes"] - before < sum(map(len, pictures)) + 6 * 4096


def test_readers_side_by_side_with_a_cache_of_a_few_blocks_all_read_the_right_bytes(address, local, monkeypatch):
    monkeypatch.setattr(samples_module, "DEFAULT_BYTES", 6 << 20)
    dataset, wrong = Dataset(address), []

    def read(seed):
        for id in np.random.default_rng(seed).integers(0, local.n, 60).tolist():
            if dataset.jpeg(id) != local.jpeg(id):
                wrong.append(id)

    def read_in_order():
        for first in range(0, local.n, 256):
            with dataset.files.hold(np.arange(first, first + 256)):
                wrong.extend(id for id in range(first, first + 256, 16) if dataset.jpeg(id) != local.jpeg(id))

    threads = [threading.Thread(target=read, args=[seed]) for seed in range(3)] + [
        threading.Thread(target=read_in_order)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cached_bytes(dataset) <= 6 << 20


def test_a_sound_dataset_is_found_sound_and_takes_no_disk_afterwards(address):
    assert list(check_dataset(address)) == []


@pytest.mark.parametrize("suffix", ["beton", "rows", "parquet"])
def test_a_changed_object_is_found_by_its_digest(s3, local, suffix):
    address = uploaded(local.path, Address("bucket", f"changed-{suffix}"))
    changed = address / "shards" / f"shard-00002.{suffix}"
    data = bytearray((local.path / "shards" / changed.name).read_bytes())
    data[-100] ^= 1
    changed.write(bytes(data))
    assert ("digest", changed.name) in [(each.kind, each.where) for each in check_dataset(address)]


def test_what_is_missing_is_named_by_its_address(s3, local):
    address = Address("bucket", "incomplete")
    with pytest.raises(DatasetError, match=r"s3://bucket/incomplete is not a dataset: it has no dataset.json"):
        Dataset(address)
    (address / "dataset.json").write(local.path / "dataset.json")
    with pytest.raises(DatasetError, match=r"s3://bucket/incomplete/shards/shard-00000.beton is missing"):
        Dataset(address)


def test_a_listing_without_end_is_refused(address, monkeypatch):
    read = []
    endless = (read.append(number) or (f"object-{number:07}", 1, "") for number in range(1_000_000))
    monkeypatch.setattr(Address, "listing", lambda self: endless)
    with pytest.raises(
        DatasetError, match=r"s3://bucket/noise/shards holds more than 10,000 objects besides the dataset"
    ):
        Dataset(address)
    assert len(read) < 20_000


def test_other_objects_beside_the_shards_are_left_alone(s3, local):
    address = uploaded(local.path, Address("bucket", "beside"))
    (address / "shards" / "notes.txt").write(b"x")
    assert len(set(Dataset(address).files.names())) == 3 * local.shards


def test_a_record_that_leads_elsewhere_is_an_error_of_its_sample(s3, local):
    address = uploaded(local.path, Address("bucket", "records"))
    records = bytearray((local.path / "shards" / "shard-00000.rows").read_bytes())
    records[64 * 6 + 1] ^= 1
    (address / "shards" / "shard-00000.rows").write(bytes(records))
    dataset = Dataset(address)
    assert dataset.jpeg(4) == local.jpeg(4)
    with pytest.raises(DatasetError, match=r"sample 5 \(row 5 of shard 0 of s3://bucket/records\) has a damaged"):
        dataset.jpeg(5)


def test_an_object_that_became_shorter_is_an_error(s3, local):
    address = uploaded(local.path, Address("bucket", "shorter"))
    dataset, shard = Dataset(address), address / "shards" / "shard-00003.beton"
    at = int(local.records(3)["jpeg_at"][-1])
    shard.write((local.path / "shards" / shard.name).read_bytes()[: at + 10])
    with pytest.raises(ObjectStoreError, match=r"shard-00003.beton ends at byte .* it was changed"):
        dataset.jpeg(local.n - 1)


def test_an_index_changed_by_hand_is_refused(s3, local):
    address = Address("bucket", "by-hand")
    index = json.loads((local.path / "dataset.json").read_text()) | {"n": 4}
    (address / "dataset.json").write(json.dumps(index).encode())
    with pytest.raises(DatasetError, match=r"s3://bucket/by-hand/dataset.json cannot be used"):
        Dataset(address)


def test_an_interrupt_ends_a_process_that_waits_for_a_store_that_is_away(s3, address):
    reads = f"""
from thermopile.pipeline.opening import Dataset
dataset = Dataset({str(address)!r})
print(flush=True)
input()
dataset.jpeg(0)
"""
    with s3.gateway() as gateway:
        process = subprocess.Popen(
            [sys.executable, "-c", reads], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with process:
            process.stdout.readline()
            gateway.stop()
            process.stdin.write(b"\n")
            process.stdin.flush()
            for line in process.stderr:  # told of after 5 s
                if b"trying again" in line:
                    break
            process.send_signal(signal.SIGINT)
            try:
                _, errors = process.communicate(timeout=40)
            finally:
                process.kill()
            assert b"KeyboardInterrupt" in errors
