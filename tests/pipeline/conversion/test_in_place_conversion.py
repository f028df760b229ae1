"""A conversion that leaves pictures in their tars gives what a conversion that copies them gives, row for row."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from thermopile.pipeline.conversion.check import check_dataset
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.dataset.samples_table import CAPTIONS
from thermopile.pipeline.errors import SourceError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.webdataset import WebDatasetSource

from support.cli import assert_one_line, cli, succeed
from support.tars import write_members

TURNED = 7
"""Of as many samples, one's picture is kept as PNG, and one's is a JPEG on its side: conversion must change both."""


def picture(number: int) -> tuple[str, bytes]:
    pixels = np.random.default_rng(number).integers(0, 256, (24 + number % 5, 32, 3), dtype=np.uint8)
    image, data, exif = Image.fromarray(pixels), io.BytesIO(), Image.Exif()
    if number % TURNED == 1:
        image.save(data, "PNG")
        return "png", data.getvalue()
    if number % TURNED == 2:
        exif[0x0112] = 6
    image.save(data, "JPEG", exif=exif)
    return "jpg", data.getvalue()


def write_tar(path, numbers):
    members = []
    for number in numbers:
        suffix, data = picture(number)
        members += [(f"{number:04}.{suffix}", data), (f"{number:04}.txt", b"picture %d" % number)]
    return write_members(path, *members)


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tars")
    return [write_tar(folder / f"{tar}.tar", range(20 * tar, 20 * tar + 20)) for tar in range(3)]


@pytest.fixture(scope="module")
def both(tars, tmp_path_factory):
    """The same tars converted, and in place."""
    folder = tmp_path_factory.mktemp("both")
    for name, in_place in (("copied", False), ("placed", True)):
        convert(WebDatasetSource(tars, in_place=in_place), folder / name, ConvertSettings(), workers=1)
    return Dataset(folder / "copied"), Dataset(folder / "placed")


def assert_equal(copied: Dataset, placed: Dataset):
    assert (copied.n, copied.index.first_id) == (placed.n, placed.index.first_id)
    assert copied.table_of(0, [*copied.schema.names, CAPTIONS]) == placed.table_of(0, [*placed.schema.names, CAPTIONS])
    assert [copied.jpeg(i) for i in range(copied.n)] == [placed.jpeg(i) for i in range(placed.n)]
    for shard in range(copied.shards):
        rows = np.arange(len(copied.shard(shard)))
        assert np.array_equal(copied.shard(shard).tokens(rows), placed.shard(shard).tokens(rows))
        for column in ("jpeg_checksum", "tokens_checksum", "source_index", "height", "width"):
            assert np.array_equal(copied.records(shard)[column], placed.records(shard)[column])
    assert not [*check_dataset(placed.place, workers=1)]


def test_ids_captions_tokens_and_pictures_are_those_of_a_conversion_that_copies(both):
    copied, placed = both
    assert_equal(copied, placed)
    assert copied.index.fingerprint != placed.index.fingerprint


def test_only_pictures_that_must_change_are_stored(both):
    _, placed = both
    changed = sum(number % TURNED in (1, 2) for number in range(60))
    assert placed.index.source["pictures_in_tars"] == 60 - changed
    assert (placed.records(0)["jpeg_at"] >> np.uint64(63)).sum() == changed


def test_further_tars_below_the_same_root_are_appended(tars, tmp_path):
    folder = tars[0].parent
    more = write_tar(folder / "more.tar", range(60, 80))
    for name, words in (("copied", []), ("placed", ["--in-place"])):
        for given in (tars, [more]):
            last = ["--append"] if given == [more] else []
            succeed("convert", "webdataset", *given, tmp_path / name, "--workers", "1", *words, *last)
    copied, placed = Dataset(tmp_path / "copied"), Dataset(tmp_path / "placed")
    assert placed.n == 80
    pictures = [[dataset.jpeg(i) for i in range(80)] for dataset in (copied, placed)]
    assert pictures[0] == pictures[1]
    assert [name for name, _, _ in placed.index.tars.files] == ["0.tar", "1.tar", "2.tar", "more.tar"]
    elsewhere = write_tar(tmp_path / "elsewhere.tar", range(80, 82))
    done = cli("convert", "webdataset", elsewhere, tmp_path / "placed", "--in-place", "--append")
    assert_one_line(done, 1, f"{elsewhere} cannot stay in place")


def test_a_tar_that_is_a_link_is_refused(tars, tmp_path):
    os.symlink(tars[0], tmp_path / "link.tar")
    with pytest.raises(SourceError, match=r"link\.tar cannot stay in place"):
        WebDatasetSource([tmp_path / "link.tar"], in_place=True)
