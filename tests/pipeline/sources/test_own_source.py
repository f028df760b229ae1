"""A user's source: what is checked of its samples, and what it may leave to thermopile.Source."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from thermopile.pipeline.conversion.marker import read_bad_samples
from thermopile.pipeline.errors import BadSampleError, SourceError
from thermopile.pipeline.sources import NEVER, Asked, Sample, Source
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.splits import Drawn

from support.conversions import dataset_of, many_shards
from support.pictures import as_bytes, draw


class Own(Source):
    """Pictures of which `change` makes what the source returns, given a sound sample and its index."""

    def __init__(self, change=lambda sample, index: sample, mode="images", samples=12):
        self.change, self.mode, self.samples = change, mode, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return self.change(Sample(self.uri(index), self.key(index), draw(index)), index)

    def uri(self, index):
        return f"own:{index}"

    def key(self, index):
        return str(index)

    def describe(self):
        return {"kind": "own"}


def opened(data):
    return Image.open(io.BytesIO(data))


def having(**fields):
    return lambda sample, index: sample._replace(**fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda sample, index: (*sample,), "sample 3 of the source is a tuple; return a thermopile.Sample"),
        (lambda sample, index: None, "is a NoneType"),
        (lambda sample, index: {"picture": sample.picture}, "is a dict"),
        (having(group=3), "sample 3 of the source has a group of type int. .* group are text or None"),
        (having(group=np.int64(3)), "a group of type int64"),
        (having(group=float("nan")), "a group of type float"),
        (having(picture=np.zeros((4, 4, 3), np.uint8)), "a picture of type ndarray. .* a file's bytes or a PIL image"),
        (having(picture=Path("a.png")), "a picture of type .*Path"),
        (having(picture="a.png"), "a picture of type str"),
        (having(picture=io.BytesIO(b"")), "a picture of type BytesIO"),
        (having(picture=None), "a picture of type NoneType"),
        (having(key=3), "a key of type int"),
        (having(uri=Path("a")), "a uri of type .*Path"),
        (having(caption=b"a dog"), "a caption of type bytes"),
        (having(caption=["a dog", "a cat"]), "a caption of type list"),
    ],
)
def test_a_sample_of_another_type_is_refused_with_its_index_and_what_it_should_be(change, said):
    with pytest.raises(SourceError, match=said):
        Own(change).sample(3, NEVER)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "no caption"),
        ({"caption": ""}, "no caption"),
        ({"caption": " \n", "further_captions": ("\t",)}, "no caption"),
        ({"caption": "\ud800"}, "not UTF-8"),
        ({"caption": "x" * 2_000_000}, "a caption or class of 2,000,000 bytes"),
        ({"caption": "x", "further_captions": ("y",) * 64}, "65 captions"),
    ],
)
def test_a_pair_without_a_usable_caption_is_left_out(fields, said):
    with pytest.raises(BadSampleError, match=said):
        Own(having(**fields), "pairs").sample(3, NEVER)


def test_blank_captions_and_classes_are_none():
    pair = Own(having(caption=" a dog ", further_captions=("", "a cat"), group=""), "pairs").sample(0, NEVER)
    assert (pair.captions, pair.group) == (("a dog", "a cat"), None)


def test_captions_are_those_of_the_samples_and_none_at_all_is_refused_before_any_work():
    def change(sample, index):
        if index == 4:
            raise BadSampleError("the record is empty")
        return sample._replace(caption=f"picture {index}" if index < 9 else None)

    source = Own(change, "pairs")
    assert [*source.captions(np.arange(3, 12))] == [f"picture {index}" for index in (3, 5, 6, 7, 8)]
    assert source.lengths(Asked()).context_length == 32
    assert [*Own(having(caption="ignored")).captions(np.arange(12))] == []
    with pytest.raises(SourceError, match="none of 12 samples has a caption; the first: no caption; add one"):
        Own(mode="pairs").lengths(Asked())


def test_classes_are_read_from_the_samples_where_a_source_does_not_list_them():
    def change(sample, index):
        if index == 7:
            raise BadSampleError("the record is empty")
        return sample._replace(group=["10", "9", None][index % 3])

    groups = Own(change).groups()
    assert groups.names == ("", "9", "10")  # as numbers
    assert groups.of_sample.tolist() == [2, 1, 0, 2, 1, 0, 2, 0, 0, 2, 1, 0]
    assert Own().groups() is None
    test = Drawn(6, None, 0, test=True)(12, Own(having(group="a")).groups())
    assert len(test) == 6


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("side", [8, 80])
def test_a_source_makes_as_many_shards_as_a_folder_of_its_pictures(kind, side, tmp_path, monkeypatch):
    many_shards(monkeypatch, 16)
    monkeypatch.setattr("thermopile.pipeline.sources.shards.MIN_SHARD_BYTES", 20_000)
    files = [as_bytes(draw(number, side, side), kind) for number in range(128)]
    for number, file in enumerate(files):
        (tmp_path / f"{number:03}.{kind.lower()}").write_bytes(file)
    source = Own(lambda sample, index: sample._replace(picture=files[index]), samples=128)
    expected = FolderSource(tmp_path).extent(None)["shards"]
    assert source.extent(None)["shards"] == expected <= 8


def test_shards_of_generated_pictures_are_as_large_as_those_of_files(monkeypatch):
    many_shards(monkeypatch, 16)
    assert Own(having(picture=Image.new("RGB", (28, 28))), samples=256).stored_bytes() < 256 * 100
    assert Own(having(picture=opened(as_bytes(draw(1), "PNG")[:90])), samples=256).stored_bytes() is None  # damaged
    assert Own(samples=15).stored_bytes() is None  # one shard, which no size changes


def test_a_picture_that_was_opened_and_not_loaded_is_read_like_a_file(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = as_bytes(draw(3, 24, 32), "JPEG", exif=exif)
    pictures = [*map(opened, (as_bytes(draw(0), "PNG"), as_bytes(draw(1), "PNG")[:90], lying)),
                *(Image.new("RGBA", size) for size in ((0, 4), (70_000, 1), (8, 8)))]  # fmt: skip
    source = Own(lambda sample, index: sample._replace(picture=pictures[index]), samples=6)
    dataset = dataset_of(source, tmp_path / "out", max_error_rate=1.0)
    sizes = {row["key"]: (row["width"], row["height"]) for row in dataset.rows(range(dataset.n))}
    assert sizes == {"0": (32, 24), "2": (24, 32), "5": (8, 8)}
    left_out = {bad.key: bad.reason for bad in read_bad_samples(dataset.place / "errors.jsonl")}
    assert left_out.keys() == {"1", "3", "4"}
    assert "truncated" in left_out["1"]
