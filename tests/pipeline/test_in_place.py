"""Datasets in place, whose pictures stay in the tars they came from: what a converted dataset gives, or an error."""

import logging
import os
import shutil

import numpy as np
import pytest

from thermopile.pipeline.conversion.check import check_dataset
from thermopile.pipeline.dataset import shard
from thermopile.pipeline.dataset.index import read_index
from thermopile.pipeline.dataset.row_records import write_row_records
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.loading import reader
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.opening import Dataset, Mixture, open_dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.storage.local import LocalPath
from thermopile.trainer.run.own_dataset import open_own
from thermopile.trainer.run_directory import RunDirectory

from support.damage import flip
from support.in_place import IN_BETON, change_index, in_place, versions_of
from support.open_files import open_files


@pytest.fixture(scope="module")
def placed(of_tars, tmp_path_factory):
    """The dataset in place, of the tars of `of_tars`."""
    tars, converted = of_tars
    return in_place(converted, tars, tmp_path_factory.mktemp("placed") / "out")


@pytest.fixture
def copy(of_tars, placed, tmp_path):
    """A copy of the dataset in place and of its tars, in tmp_path/tars, to damage."""
    shutil.copytree(placed, tmp_path / "out")
    shutil.copytree(of_tars[0][0].parent, tmp_path / "tars")
    times = [tar.stat().st_mtime_ns for tar in sorted((tmp_path / "tars").iterdir())]
    versions_of(tmp_path / "out", tmp_path / "tars", times)
    return tmp_path / "out"


def batches(dataset):
    order = Order.create(dataset.n, 64)
    with FFCVLoader(dataset, order, recipe=RECIPES["clip"], image_size=32, views=1, workers=2) as loader:
        return [(batch.sample_ids, batch.views[0], batch.tokens) for batch in loader.epoch(0)]


def in_a_tar(path):
    """The first row of a shard whose picture is in a tar, and its record."""
    records = Dataset(path).records(0)
    row = int(np.flatnonzero(records["jpeg_at"] < IN_BETON)[0])
    return row, records[row]


def test_pictures_tokens_and_tables_are_those_of_the_conversion(of_tars, placed):
    converted, dataset = of_tars[1], Dataset(placed)
    assert [dataset.jpeg(id) for id in range(dataset.n)] == [converted.jpeg(id) for id in range(dataset.n)]
    np.testing.assert_array_equal(dataset.shard(0).tokens(np.arange(9)), converted.shard(0).tokens(np.arange(9)))
    np.testing.assert_array_equal(dataset.shard(0).tokens_of(8), converted.shard(0).tokens_of(8))
    assert dataset.column("caption") == converted.column("caption")
    for ours, theirs in zip(batches(dataset), batches(converted), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine, other)
    assert list(check_dataset(LocalPath(placed))) == []


def test_few_tars_are_open_at_a_time(copy, tmp_path, monkeypatch):
    for module in (shard, reader):
        monkeypatch.setattr(module, "max_open_shards", lambda: 2)
    dataset, opened, counts = Dataset(copy), shard.OpenFiles.__getitem__, []

    def counted(self, number):
        found = opened(self, number)
        counts.append(sum(name.startswith(f"{tmp_path}/tars/") for name in open_files()))
        return found

    monkeypatch.setattr(shard.OpenFiles, "__getitem__", counted)
    batches(dataset)
    assert 2 < max(counts) <= 2 + 2  # those kept, and one held by each of the loader's threads


def test_its_fingerprint_is_its_own_wherever_its_tars_are(of_tars, placed, tmp_path):
    tars, converted = of_tars
    index = read_index(placed)
    assert index.fingerprint != converted.index.fingerprint
    shutil.copytree(placed, tmp_path / "out")
    versions_of(tmp_path / "out", "s3://elsewhere/tars", ["etag"] * len(tars))
    assert read_index(tmp_path / "out").fingerprint == index.fingerprint
    name, size, version = index.tars.files[0]
    for other in ("other.tar", size, version), (name, size + 1, version):
        change_index(tmp_path / "out", tars={"root": "/", "files": [list(other), *map(list, index.tars.files[1:])]})
        assert read_index(tmp_path / "out").fingerprint != index.fingerprint


def test_a_mixture_may_have_both_forms(of_tars, placed):
    converted = of_tars[1]
    mixed = Mixture([Dataset(placed), converted])
    assert mixed.index.tars is None
    ours = batches(mixed)
    assert ours[0][1].equal(batches(Mixture([converted, converted]))[0][1])


def test_without_its_pictures_it_needs_no_tars(copy, tmp_path):
    shutil.rmtree(tmp_path / "tars")
    assert open_dataset(copy, pictures=False).tokenizer_path.exists()


def test_moved_tars_are_found_by_their_new_root_alone(copy, tmp_path, caplog):
    (tmp_path / "tars").rename(tmp_path / "moved")
    with pytest.raises(DatasetError, match=r"tars/00000.tar is missing, .* with --tars ROOT \(data.tars\)"):
        Dataset(copy)
    with caplog.at_level(logging.WARNING):
        assert Dataset(copy, tmp_path / "moved").jpeg(3)
        assert not caplog.records
        os.utime(tmp_path / "moved" / "00001.tar")
        assert Dataset(copy, tmp_path / "moved").jpeg(3)
    assert [record.message.partition(" have")[0] for record in caplog.records] == [f"1 tars in {tmp_path / 'moved'}"]


def test_a_root_is_refused_where_the_pictures_are_in_the_dataset(of_tars, tmp_path):
    with pytest.raises(DatasetError, match="holds its pictures itself; leave out --tars"):
        Dataset(of_tars[1].path, tmp_path)


def shortened(tar):
    os.truncate(tar, tar.stat().st_size - 512)


def linked(tar):
    tar.rename(tar.with_name("elsewhere"))
    tar.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (shortened, "is not what was converted: its size or ETag differs"),
        (linked, "is missing, or a link"),
        (os.unlink, "is missing"),
    ],
)
def test_another_tar_is_refused_by_its_name(copy, tmp_path, damage, what):
    damage(tmp_path / "tars" / "00001.tar")
    with pytest.raises(DatasetError, match=rf"tars/00001.tar {what}"):
        Dataset(copy)


def test_of_a_run_whose_tars_were_moved_the_error_says_how_the_run_learns_their_place(copy, tmp_path):
    (tmp_path / "tars").rename(tmp_path / "moved")
    said = r"--resume --tars ROOT`; if they were changed, convert them again\. If the run's dataset was moved, pass its"
    with pytest.raises(DatasetError, match=said):
        open_own(RunDirectory(tmp_path / "run"), copy, "")


def test_no_link_is_followed_to_a_folder_below_the_root(copy, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "within").symlink_to(tmp_path / "tars")
    files = [[f"within/{name}", *rest] for name, *rest in read_index(copy).tars.files]
    change_index(copy, tars={"root": str(tmp_path / "root"), "files": files})
    with pytest.raises(DatasetError, match=r"root/within/00000.tar is missing, or a link"):
        Dataset(copy)


@pytest.mark.parametrize("name", ["../00000.tar", "/etc/passwd", "a//b.tar", "a/./b.tar", "", "a\\b.tar", "a\nb.tar"])
def test_a_name_that_may_lead_out_of_the_root_is_refused(copy, name):
    files = [list(each) for each in read_index(copy).tars.files]
    with pytest.raises(DatasetError, match="not a plain name below their root"):
        change_index(copy, tars={"root": "/", "files": [[name, *files[0][1:]], *files[1:]]})


@pytest.mark.parametrize("root", ["s3://user:secret@bucket/x", "http://elsewhere/x"])
def test_a_malformed_root_is_refused(copy, root):
    change_index(copy, tars={"root": root, "files": [list(each) for each in read_index(copy).tars.files]})
    with pytest.raises(DatasetError, match="the root of the tars: "):
        Dataset(copy)


def flipped(tar, at):
    flip(tar, 8 * (at + 100))


def replaced(tar, at):
    data = bytearray(tar.read_bytes())
    tar.write_bytes(data[512:] + data[:512])


def cut_while_open(tar, at):
    os.truncate(tar, at + 10)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flipped, "changed after its conversion: the checksum of its picture does not match"),
        (replaced, "changed after its conversion: the checksum of its picture does not match"),
        (cut_while_open, "cannot be read: its file was cut short"),
    ],
)
def test_changed_bytes_name_the_sample_and_its_tar(copy, tmp_path, damage, what):
    row, record = in_a_tar(copy)
    name = f"{int(record['source_index']) >> 32:05d}.tar"
    dataset = Dataset(copy)
    damage(tmp_path / "tars" / name, int(record["jpeg_at"]))
    message = rf"sample {row} \(row {row} of shard 0 of .*out, picture in {name}\) {what}"
    with pytest.raises(DatasetError, match=message):
        dataset.jpeg(row)
    with pytest.raises(DatasetError, match="picture in "):
        batches(dataset)
    if damage is flipped:
        assert [each.where for each in check_dataset(LocalPath(copy))] == [f"shard-00000.beton, row {row:,}"]


@pytest.mark.parametrize(
    "lies",
    [
        {"jpeg_at": lambda record, size: size - int(record["jpeg_bytes"]) + 1},
        {"jpeg_at": lambda record, size: IN_BETON - 1},
        {"jpeg_at": lambda record, size: IN_BETON | size},
        {"source_index": lambda record, size: 99 << 32},
        {"source_index": lambda record, size: -1},
    ],
)
def test_a_record_that_leads_out_of_its_tar_is_refused(copy, tmp_path, lies):
    row, record = in_a_tar(copy)
    size = (tmp_path / "tars" / f"{int(record['source_index']) >> 32:05d}.tar").stat().st_size
    records = Dataset(copy).records(0).copy()
    for name, lie in lies.items():
        records[name][row] = lie(record, size)
    (copy / "shards" / "shard-00000.rows").unlink()
    write_row_records(
        copy / "shards" / "shard-00000.rows", records, (copy / "shards" / "shard-00000.beton").stat().st_size
    )
    with pytest.raises(DatasetError, match=rf"sample {row} .* has a damaged or unreadable record"):
        Dataset(copy).jpeg(row)
