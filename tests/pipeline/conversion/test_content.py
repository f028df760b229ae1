"""What a conversion counts: captions that repeat, exact copies and blank pictures."""

import shutil
from functools import partial

import numpy as np
import pytest
from PIL import Image

from thermopile.pipeline.conversion import content
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.dataset.index import Content, read_index
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.csv_source import CsvSource

from support.cli import succeed
from support.conversions import many_shards
from support.datasets import change_content
from support.pictures import draw

HOSTILE = "\x1b[31mred" + " and so on" * 7
PLAIN = ConvertSettings(context_length=64)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A list of 46 samples; `first.csv` and `second.csv` have 30 and 16 of them.

    One caption occurs 9 times, another 3 times; one picture 4 times, another twice; 4 pictures are blank.
    """
    root = tmp_path_factory.mktemp("repeats")
    for i in range(40):
        draw(i).save(root / f"{i}.png")
    nearly = Image.new("RGB", (32, 24), (200, 3, 9))
    nearly.putpixel((31, 23), (0, 250, 9))
    for name, image in {
        "clear.png": Image.new("RGBA", (32, 24), (5, 90, 5, 0)), "one.png": Image.new("RGB", (32, 24), (200, 3, 9)),
        "kept.jpg": Image.new("RGB", (32, 24), (20, 30, 90)), "grey.jpg": Image.new("L", (32, 24), 77),
        "nearly.png": nearly, "nearly.jpg": nearly,
    }.items():  # fmt: skip
        image.save(root / name)
    files = [f"{i}.png" for i in range(36)] + ["7.png", "7.png", "8.png", "7.png"]
    files += ["clear.png", "one.png", "kept.jpg", "grey.jpg", "nearly.png", "nearly.jpg"]
    captions = [f"caption number {i}" for i in range(46)]
    captions[0:45:5], captions[1:30:10] = [HOSTILE] * 9, ["twice told"] * 3
    order = np.random.default_rng(0).permutation(46)
    rows = [f"{files[i]},{captions[i]}" for i in order]
    for name, some in (("all", rows), ("first", rows[:30]), ("second", rows[30:])):
        (root / f"{name}.csv").write_text("\n".join(["filepath,title", *some]) + "\n")
    return root


EXPECTED = {"samples": 46, "sharing_captions": 12, "with_caption": 9, "copies": 4, "most_copied": 4, "blank": 4}


def counts(path):
    found = read_index(path).content.model_dump()
    sample = found.pop("caption_sample")
    captions = Dataset(path).column("caption").to_pylist()
    assert sample == captions.index(HOSTILE)
    return found


run = partial(succeed, "convert")


@pytest.fixture(scope="module")
def converted(pictures):
    run("csv", pictures / "first.csv", pictures / "out", "--context-length", 64)
    return pictures / "out"


@pytest.fixture
def first(converted, tmp_path):
    """The dataset of the first 30 samples."""
    return shutil.copytree(converted, tmp_path / "out")


@pytest.mark.parametrize("at_once", [1, 7, 45])
def test_counts_are_the_same_where_checksums_are_sorted_on_disk(pictures, tmp_path, monkeypatch, at_once):
    many_shards(monkeypatch, rows=10)
    convert(CsvSource(pictures / "all.csv"), tmp_path / "out", PLAIN, workers=1)
    records = sorted((tmp_path / "out" / "shards").glob("*.rows"))
    in_memory = content.content_of(records, 46, pairs=True, blank=4)
    monkeypatch.setattr(content, "SORTED_AT_ONCE", at_once)
    assert content.content_of(records, 46, pairs=True, blank=4) == in_memory == read_index(tmp_path / "out").content


def test_an_append_counts_old_and_new_samples_together(pictures, first):
    before = counts(first)
    assert all(before[name] <= EXPECTED[name] for name in EXPECTED)
    result = run("csv", pictures / "second.csv", first, "--append")
    assert counts(first) == EXPECTED
    assert result.stdout.count("share their caption") == 1  # not of the new ones alone
    assert "share their caption with another: 12; " in result.stdout.split("46 samples with those appended")[1]


def test_blank_pictures_that_an_earlier_version_converted_are_said_to_be_unknown(pictures, first):
    change_content(first)
    result = run("csv", pictures / "second.csv", first, "--append")
    assert counts(first) == EXPECTED | {"blank": None}
    assert "  blank pictures, of one colour: unknown, as an earlier version converted some samples" in result.stdout


def test_the_summary_tells_them_with_the_caption_escaped_and_cut(pictures, tmp_path):
    result = run("csv", pictures / "all.csv", tmp_path / "out", "--context-length", 64)
    assert "\x1b" not in result.output
    caption = "[U+001B][31mred" + " and so on" * 5 + " a…"
    assert result.stdout.splitlines()[1:4] == [
        f"  samples that share their caption with another: 12; the most frequent, “{caption}”, occurs 9 times",
        "  exact copies of earlier pictures: 4; the most frequent picture occurs 4 times",
        "  blank pictures, of one colour: 4",
    ]


def test_captions_that_are_equal_only_once_they_are_cut_are_said_to_be_cut(pictures, tmp_path):
    """The rows of the source differ: without the words the reader looks in vain for the caption that occurs twice."""
    (pictures / "long.csv").write_text(
        "filepath,title\n" + "".join(f"{i}.png,{' and so on' * 40} {i}\n" for i in range(30))
    )
    result = run("csv", pictures / "long.csv", tmp_path / "out", "--context-length", 16)
    assert "  30 captions were truncated to 16 tokens\n" in result.stdout
    assert "  samples that share their caption, as cut to 16 tokens, with another: 30; " in result.stdout


def test_pictures_without_captions_share_none_and_silence_means_no_repetition(pictures, tmp_path):
    rows = (pictures / "all.csv").read_text().splitlines()
    (pictures / "bare.csv").write_text("\n".join(row.partition(",")[0] for row in rows) + "\n")
    run("csv", pictures / "bare.csv", tmp_path / "out", "--caption", "")
    found = read_index(tmp_path / "out").content
    assert found == Content(**EXPECTED | {"sharing_captions": 0, "with_caption": 0, "caption_sample": 0})
    (pictures / "few.csv").write_text("filepath\n1.png\n2.png\n")
    assert len(run("csv", pictures / "few.csv", tmp_path / "few", "--caption", "").stdout.splitlines()) == 2


def test_samples_of_the_test_set_that_the_training_set_has_too_are_counted(pictures, tmp_path, monkeypatch):
    many_shards(monkeypatch, rows=10)
    words = "--context-length", 64, "--workers", 1
    said = run("csv", pictures / "all.csv", tmp_path / "out", "--holdout", 18, *words).stdout
    train, test = Dataset(tmp_path / "out"), Dataset(tmp_path / "out-test")
    in_train = [{*map(train.jpeg, range(train.n))}, {*train.column("caption").to_pylist()}]
    of_test = [map(test.jpeg, range(test.n)), test.column("caption").to_pylist()]
    copied, told = (sum(each in there for each in own) for own, there in zip(of_test, in_train, strict=True))
    assert min(copied, told, train.shards - 1) > 0, "nothing would be counted"
    have = f"{copied} have the picture and {told} have the captions of a training sample"
    assert f"  of 18 samples in out-test, {have}\n" in said
    (pictures / "unlike.csv").write_text("filepath,title\n" + "".join(f"{i}.png,number {i}\n" for i in range(20)))
    assert "of a training sample" not in run("csv", pictures / "unlike.csv", tmp_path / "un", "--holdout", 9).stdout


@pytest.mark.parametrize("damaged", [lambda data: data[:-64], lambda data: data[:-3], lambda data: b""])
def test_a_cut_shard_is_an_error_and_no_smaller_count(first, damaged):
    file = first / "shards" / "shard-00000.rows"
    file.write_bytes(damaged(file.read_bytes()))
    with pytest.raises(DatasetError, match=r"the \.rows files beside .*shard-00000\.rows hold (29|0) samples, not 30"):
        content.content_of([file], 30, pairs=True, blank=0)


def test_counts_that_do_not_fit_the_samples_or_of_an_earlier_version_are_ignored(first):
    counted = read_index(first).content.model_dump()
    change_content(first, counted)
    assert read_index(first).content == Content(**counted)
    for wrong in ({"samples": 29}, {"with_caption": 31}, {"caption_sample": 30}, {"blank": 31}):
        change_content(first, counted | wrong)
        assert read_index(first).content is None, wrong


def test_the_fingerprint_does_not_depend_on_the_counts(first):
    before = read_index(first).fingerprint
    change_content(first)
    assert (read_index(first).content, read_index(first).fingerprint) == (None, before)


@pytest.mark.parametrize("found", [None, [], {"copies": 1}, EXPECTED | {"samples": 30, "caption_sample": "\x1b[2J"},
                                   EXPECTED | {"samples": 30, "caption_sample": -1}])  # fmt: skip
def test_damaged_counts_count_as_none(first, found):
    change_content(first, found)
    assert read_index(first).content is None
