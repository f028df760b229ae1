"""Datasets in place whose tars are in an object store: the converted dataset's samples, through a small cache."""

import threading

import numpy as np
import pytest

from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.conversion.check import check_dataset
from thermopile.pipeline.dataset.index import read_index
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.opening import Dataset, Mixture
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.remote import samples as samples_module
from thermopile.pipeline.remote import schedule
from thermopile.storage.bucket import Address
from thermopile.storage.local import LocalPath

from support.in_place import IN_BETON, in_place, versions_of
from support.remote_reading import assert_same, cached_bytes

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def root(s3, of_tars):
    """The tars in the store."""
    return uploaded(of_tars[0][0].parent, Address("bucket", "tars"))


@pytest.fixture(scope="module")
def placed(of_tars, root, tmp_path_factory):
    """The dataset on disk, in place of the tars in the store."""
    tars, converted = of_tars
    out = in_place(converted, tars, tmp_path_factory.mktemp("placed") / "out")
    versions_of(out, root, [version for _, _, version in root.listing()])
    return LocalPath(out)


@pytest.fixture(scope="module")
def places(s3, placed):
    """The dataset on disk and in the store."""
    return {"disk": placed, "store": uploaded(placed, Address("bucket", "placed"))}


@pytest.fixture
def own_root(of_tars, placed, request):
    """Tars of the test's own in the store, of the dataset on disk."""
    root = uploaded(of_tars[0][0].parent, Address("bucket", request.node.name.partition("[")[0]))
    versions_of(placed, root, [version for _, _, version in root.listing()])
    return root


@pytest.mark.parametrize("where", ["disk", "store"])
def test_pictures_tables_and_tokens_are_the_conversion_s(places, of_tars, where):
    dataset, converted = Dataset(places[where]), of_tars[1]
    assert dataset.fetches
    ids = [0, 5, 7, 8, 599, 300]
    assert [dataset.jpeg(id) for id in ids] == [converted.jpeg(id) for id in ids]
    assert dataset.column("caption") == converted.column("caption")
    assert list(check_dataset(places[where])) == []


def test_tars_may_be_on_disk_and_the_dataset_in_a_store(places, of_tars):
    tars, converted = of_tars
    dataset = Dataset(places["store"], tars[0].parent)
    assert [dataset.jpeg(id) for id in range(0, 600, 50)] == [converted.jpeg(id) for id in range(0, 600, 50)]
    assert list(check_dataset(places["store"], tars=tars[0].parent)) == []


@pytest.mark.parametrize("where", ["disk", "store"])
def test_small_windows_give_the_conversion_s_pixels_and_free_all_that_they_fetched(places, of_tars, where):
    dataset, converted = Dataset(places[where]), of_tars[1]
    order = Order.for_memory(150, dataset.n, 25)
    assert order.window_blocks < order.blocks_per_shard
    limit, peaks = int(dataset.files.beton_bytes().sum()) * 3 // 4, []
    assert_same(dataset, converted, order, limit, epochs=3, after=lambda step: peaks.append(cached_bytes(dataset)))
    assert limit // 4 < max(peaks) <= limit
    samples = dataset.files
    with samples.lock:
        samples.room.limit = 0
        samples.room._make_room(0, later_than=-1 << 62)
    assert cached_bytes(dataset) == 0
    assert not samples._contents


@pytest.mark.parametrize("where", ["disk", "store"])
def test_readers_side_by_side_with_a_small_cache_all_read_the_right_bytes(places, of_tars, monkeypatch, where):
    monkeypatch.setattr(samples_module, "DEFAULT_BYTES", 400_000)
    monkeypatch.setattr(schedule, "ROWS_WITHOUT_ORDER", 16)
    dataset, converted, wrong = Dataset(places[where]), of_tars[1], []

    def read(seed):
        random = np.random.default_rng(seed)
        for _ in range(15):
            ids = random.integers(0, dataset.n, 12)
            with dataset.files.hold(ids):
                wrong.extend(id for id in ids.tolist() if dataset.jpeg(id) != converted.jpeg(id))

    threads = [threading.Thread(target=read, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    dataset.files.hold(np.array([0])).release()
    assert 0 < cached_bytes(dataset) <= 400_000


def test_a_store_that_fails_now_and_then_changes_nothing(s3, places, of_tars):
    with s3.gateway(failing=0.05) as gateway:
        dataset = Dataset(places["disk"])
        order = Order.for_memory(150, dataset.n, 25)
        assert_same(dataset, of_tars[1], order, int(dataset.files.beton_bytes().sum()) * 3 // 4, epochs=2, name="dali")
        assert gateway.stats()["failed"] > 0


def test_one_request_fetches_neighbours_in_a_tar_and_keeps_only_what_was_asked_for(s3, places, of_tars):
    with s3.gateway() as gateway:
        dataset = Dataset(places["disk"])
        (records,) = map(dataset.records, range(dataset.shards))
        ids = np.flatnonzero((records["source_index"] & 1 == 0) & (records["jpeg_at"] < IN_BETON))
        before = gateway.stats()
        dataset.files.hold(ids).release()
        after = gateway.stats()
    assert after["requests"] - before["requests"] == len(of_tars[0])
    assert after["bytes"] - before["bytes"] < 1.1 * sum(tar.stat().st_size for tar in of_tars[0])
    assert cached_bytes(dataset) == dataset.files.size_of(ids)


def test_a_check_keeps_its_shard_whole_while_its_pictures_come_and_go(places, monkeypatch):
    monkeypatch.setattr(samples_module, "DEFAULT_BYTES", 400_000)
    monkeypatch.setattr(schedule, "ROWS_WITHOUT_ORDER", 16)
    assert list(check_dataset(places["store"])) == []


def test_the_start_is_one_listing(s3, places):
    with s3.gateway() as gateway:
        Dataset(places["disk"])
        assert gateway.stats()["requests"] <= 2  # the second finds no more


def in_a_tar(dataset, tar):
    """A row of the first shard whose picture is in this tar, and its record."""
    records = dataset.records(0)
    is_there = (records["jpeg_at"] < IN_BETON) & (records["source_index"] >> 32 == tar)
    row = int(np.flatnonzero(is_there)[0])
    return row, records[row]


def changed(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda data: changed(data, 1000), "is not what was converted: its size or ETag differs"),
        (lambda data: data[:-512], "is not what was converted: its size or ETag differs"),
        (None, "is missing"),
    ],
)
def test_another_object_is_refused_by_its_name(placed, own_root, damage, what):
    tar = own_root / "00002.tar"
    tar.delete() if damage is None else tar.write(damage(tar.read_bytes()))
    with pytest.raises(DatasetError, match=rf"{tar} {what}.*--tars ROOT"):
        Dataset(placed)


def test_an_object_replaced_while_the_dataset_is_open_is_refused_by_its_name(placed, own_root):
    dataset = Dataset(placed)
    row, _ = in_a_tar(dataset, 2)
    tar = own_root / "00002.tar"
    tar.write(changed(tar.read_bytes(), 1000))
    with pytest.raises(FileExistsError, match=f"{tar} was replaced by another object"):
        dataset.jpeg(row)


def test_copied_tars_are_verified_by_their_pictures(placed, own_root, caplog):
    row, record = in_a_tar(Dataset(placed), 2)
    copies = Address("bucket", "copies")
    for name, _, _ in own_root.listing():
        (copies / name).write((own_root / name).read_bytes())
    assert Dataset(placed, copies).jpeg(row) == Dataset(placed).jpeg(row)
    assert not caplog.records
    copy = copies / "00002.tar"
    copy.write(changed(copy.read_bytes(), int(record["jpeg_at"]) + 100))
    dataset = Dataset(placed, copies)
    assert caplog.records[0].message.startswith("1 tars in s3://bucket/copies have another")
    with pytest.raises(DatasetError, match=rf"sample {row} .*, picture in 00002.tar\) changed after"):
        dataset.jpeg(row)
    with pytest.raises(DatasetError, match=r"s3://bucket/elsewhere/00000.tar is missing"):
        Dataset(placed, "s3://bucket/elsewhere")


def test_it_cannot_be_part_of_a_mixture(placed, own_root, of_tars):
    with pytest.raises(DatasetError, match="cannot be part of a mixture"):
        Mixture([of_tars[1], Dataset(placed)])


def test_the_index_names_versions(placed, own_root):
    assert all(isinstance(tar.version, str) for tar in read_index(placed).tars.files)
