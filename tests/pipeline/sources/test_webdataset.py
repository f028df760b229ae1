"""Tar shards as webdataset and img2dataset write them."""

import errno
import gzip
import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest
import webdataset
from webdataset.tariterators import group_by_keys, tar_file_expander

from thermopile.pipeline.errors import BadSampleError, SourceChangedError, SourceError
from thermopile.pipeline.sources import webdataset as module
from thermopile.pipeline.sources.listing import MAX_PICTURE_BYTES
from thermopile.pipeline.sources.webdataset import WebDatasetSource


def write_shard(path, samples):
    with webdataset.TarWriter(str(path)) as tar:
        for sample in samples:
            tar.write(sample)
    return path


def write_members(path, *members):
    """A tar of these members in this order, whatever they are called."""
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def numbered(numbers):
    return [{"__key__": f"{n:06}", "jpg": b"pixels %d" % n, "txt": f"caption {n}", "cls": n % 3} for n in numbers]


def test_samples_come_in_the_order_of_the_shards_and_of_each_tar(tmp_path):
    shards = [write_shard(tmp_path / f"{i}.tar", numbered(range(10 * i, 10 * i + 10))) for i in (1, 0)]
    seen = []
    source = WebDatasetSource(shards, on_progress=seen.append)
    numbers = [*range(10, 20), *range(10)]
    assert [source[i].picture for i in range(20)] == [b"pixels %d" % n for n in numbers]
    assert [source[i].caption for i in range(20)] == [f"caption {n}" for n in numbers]
    assert [source[i].group for i in range(20)] == [str(n % 3) for n in numbers]
    assert (source.uri(0), source.key(0), source.mode) == ("1.tar/000010.jpg", "000010", "pairs")
    assert source.groups().names == ("0", "1", "2")
    assert seen == [1, 2]


def test_samples_are_those_that_webdataset_itself_reads(tmp_path):
    shard = write_members(
        tmp_path / "0.tar",
        ("a/1.jpg", b"a"), ("a/1.txt", b"A"), ("b/1.jpg", b"b"), ("b/1.txt", b"B"),
        ("b/2.JPG", b"c"), ("b/2.txt", b"C"), ("d.x/3.jpg", b"d"), ("d.x/3.txt", b"D"),
        ("./4.tar.gz", b"-"), ("./4.jpg", b"e"), ("./4.txt", b"E"), ("plain", b"-"), (".hidden.jpg", b"-"),
        ("__meta__/1.jpg", b"-"), ("caf\xe9.jpg", b"f"), ("caf\xe9.txt", b"F"),
    )  # fmt: skip
    source = WebDatasetSource([shard])
    with shard.open("rb") as file:
        theirs = list(group_by_keys(tar_file_expander([{"url": "0.tar", "stream": file}])))
    expected = [(sample["__key__"], sample["jpg"], sample["txt"].decode()) for sample in theirs]
    assert len(expected) == 6
    assert [(source.key(i), source[i].picture, source[i].caption) for i in range(len(source))] == expected


def test_a_key_that_comes_again_is_another_sample(tmp_path):
    members = [("1.jpg", b"a"), ("1.txt", b"A"), ("1.jpg", b"b"), ("1.txt", b"B"), ("2.jpg", b"c"), ("2.txt", b"C"),
               ("1.jpg", b"d"), ("1.txt", b"D")]  # fmt: skip
    source = WebDatasetSource([write_members(tmp_path / "0.tar", *members)])
    assert [(source[i].picture, source[i].caption) for i in range(4)] == [
        (b"a", "A"), (b"b", "B"), (b"c", "C"), (b"d", "D"),
    ]  # fmt: skip


def img2dataset_shard(path):
    fields = [{"caption": "a dog", "class": 7}, {"caption": None}, {"caption": ["a cat", "a pet"], "class": "x"},
              {"caption": {"en": "?"}}, {}, {"caption": ["a", 7]}, {"caption": []}, {"caption": [" "], "class": [3]},
              {"caption": [None, "b", ""]}]  # fmt: skip
    samples = [
        {"__key__": f"{i:09}", "jpg": b"pixels", "txt": "alt text", "json": field} for i, field in enumerate(fields)
    ]
    return write_shard(path, [*samples, {"__key__": "000000099", "jpg": b"pixels"}])


def test_captions_and_classes_can_be_fields_of_the_json_member(tmp_path):
    source = WebDatasetSource([img2dataset_shard(tmp_path / "0.tar")], caption="json:caption", group="json:class")
    assert (source[0].caption, source[0].group) == ("a dog", "7")
    assert (source[2].captions, source[2].group) == (("a cat", "a pet"), "x")
    assert source[8].captions == ("b",)
    for index, reason in ((1, "no caption"), (3, "'caption' of the .json member is a dict"), (4, "no caption"),
                          (5, "entry 2 of 'caption' of the .json member is a int, not text; write it as a string"),
                          (6, "no caption"), (7, "no caption"), (9, "no caption")):  # fmt: skip
        with pytest.raises(BadSampleError, match=reason):
            source[index]
    assert list(source.captions(np.arange(10))) == ["a dog", "a cat", "a pet", "b"]
    assert source.groups().names == ("", "3", "7", "x")


def test_each_line_of_a_text_member_is_a_caption(tmp_path):
    texts = [b"\xef\xbb\xbfa dog\r\nan animal \n\n", b" \n\n", b"\n".join(b"%d" % n for n in range(65)), b"one\n\xff"]
    members = [
        (f"{n}.{suffix}", data) for n, text in enumerate(texts) for suffix, data in (("jpg", b"x"), ("txt", text))
    ]
    source = WebDatasetSource([write_members(tmp_path / "0.tar", *members)])
    assert source[0].captions == ("a dog", "an animal")
    for index, reason in ((1, "no caption"), (2, "65 captions, above 64"), (3, "not UTF-8")):
        with pytest.raises(BadSampleError, match=reason):
            source[index]
    assert list(source.captions(np.arange(4))) == ["a dog", "an animal"]


@pytest.mark.parametrize("text", [b"{", b"[1]", b"[" * 100_000, b"\xff\xfe", b'{"caption": %s}' % (b"9" * 5000), b"7"])
def test_invalid_json_is_a_bad_sample(tmp_path, text):
    source = WebDatasetSource([write_members(tmp_path / "0.tar", ("1.jpg", b"x"), ("1.json", text))],
                              caption="json:caption")  # fmt: skip
    with pytest.raises(BadSampleError, match=r"the \.json member cannot be read"):
        source[0]


def test_the_first_of_several_suffixes_that_a_sample_has_is_its_picture(tmp_path):
    shard = write_members(tmp_path / "0.tar", ("1.png", b"png"), ("1.jpg", b"jpg"), ("2.png", b"png"))
    source = WebDatasetSource([shard])
    assert [(source[i].picture, source.uri(i)) for i in range(2)] == [(b"jpg", "0.tar/1.jpg"), (b"png", "0.tar/2.png")]
    assert WebDatasetSource([shard], image="png")[0].picture == b"png"


def test_without_any_caption_and_where_none_is_wanted_it_is_images_alone(tmp_path):
    bare = write_members(tmp_path / "0.tar", ("1.jpg", b"x"), ("2.jpg", b"y"))
    source = WebDatasetSource([bare])
    assert (source.mode, source[0].caption, source.groups()) == ("images", None, None)
    source = WebDatasetSource([write_shard(tmp_path / "1.tar", numbered(range(2)))], caption=None, group=None)
    assert (source.mode, source[0].caption, source[0].group) == ("images", None, None)


def test_a_sample_without_a_picture_or_a_caption_is_a_bad_sample(tmp_path):
    members = [
        ("1.jpg", b"x"),
        ("1.txt", b"A"),
        ("2.txt", b"B"),
        ("3.jpg", b"z"),
        ("4.jpg", b"z"),
        ("4.txt", b"caf\xe9"),
    ]
    source = WebDatasetSource([write_members(tmp_path / "0.tar", *members)])
    for index, reason in ((1, "no picture: no member of this key ends in jpg"), (2, "no caption"), (3, "not UTF-8")):
        with pytest.raises(BadSampleError, match=reason):
            source[index]
    assert [source.uri(i) for i in range(4)] == ["0.tar/1.jpg", "0.tar/2.txt", "0.tar/3.jpg", "0.tar/4.jpg"]


def test_a_tar_cut_short_gives_what_is_before_the_cut_and_says_where_it_is_cut(tmp_path):
    members = [(f"{n}.{suffix}", b"%d" % n * 700) for n in range(4) for suffix in ("jpg", "txt")]
    whole = write_members(tmp_path / "whole.tar", *members)
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole.read_bytes()[: 5 * 1536 + 600])  # within 2.txt; a member is a header and two blocks
    source = WebDatasetSource([cut, whole])
    assert [source.key(i) for i in range(len(source))] == ["0", "1", "2", "", "0", "1", "2", "3"]
    assert [source[i].caption[0] for i in (0, 1, 4, 5, 6, 7)] == ["0", "1", "0", "1", "2", "3"]
    for index, reason in ((2, "no caption"), (3, r"cut short after 8,280 bytes, in b'2\.txt'")):
        with pytest.raises(BadSampleError, match=reason):
            source[index]
    assert source.uri(3) == "cut.tar"


def test_a_tar_damaged_in_its_middle_is_said_to_be(tmp_path):
    shard = write_shard(tmp_path / "0.tar", numbered(range(20)))
    data = bytearray(shard.read_bytes())
    data[20 * 512 : 40 * 512] = b"x" * (20 * 512)
    shard.write_bytes(data)
    source = WebDatasetSource([shard])
    with pytest.raises(BadSampleError, match=r"its header at byte [\d,]+ is damaged"):
        source[len(source) - 1]


def test_where_no_shard_can_be_read_the_first_ones_reason_is_given(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    (tmp_path / "text.tar").write_text("hello" * 1000)
    (tmp_path / "empty.tar").touch()
    write_members(tmp_path / "nothing.tar")
    for name, reason in (("text.tar", "not a tar archive"), ("empty.tar", "the file is empty"), (".", "not a regular"),
                         ("pipe.tar", "not a regular"), ("nothing.tar", "empty"), ("gone.tar", "No such")):  # fmt: skip
        with pytest.raises(SourceError, match=reason):
            WebDatasetSource([tmp_path / name])
    with pytest.raises(SourceError, match="no tar"):
        WebDatasetSource([])


def test_a_compressed_tar_is_answered_with_the_cure(tmp_path):
    whole = write_shard(tmp_path / "0.tar", numbered(range(2)))
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(whole.read_bytes()))
    with pytest.raises(SourceError, match=r"is compressed, .* run gunzip on it first"):
        WebDatasetSource([tmp_path / "0.tar.gz"])


def test_names_that_lead_elsewhere_are_only_text_and_links_are_not_followed(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shard = tmp_path / "0.tar"
    with tarfile.open(shard, "w") as tar:
        for name in ("../../evil.jpg", "/tmp/evil.jpg"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            member = tarfile.TarInfo(f"link{kind!r}.jpg")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    source = WebDatasetSource([shard])
    assert [source[i].picture for i in range(len(source))] == [b"evil", b"evil"]
    assert [source.uri(i) for i in range(2)] == ["0.tar/../../evil.jpg", "0.tar//tmp/evil.jpg"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0.tar", "here"]


def test_a_member_too_large_for_a_picture_is_a_bad_sample_and_not_read(tmp_path):
    header = tarfile.TarInfo("1.jpg")
    header.size = MAX_PICTURE_BYTES + 1
    with (tmp_path / "0.tar").open("wb") as tar:
        tar.write(header.tobuf())
        tar.truncate(512 + MAX_PICTURE_BYTES + 512 + 1024)
    with pytest.raises(BadSampleError, match="268,435,457 bytes, above 268,435,456"):
        WebDatasetSource([tmp_path / "0.tar"])[0]


def test_a_shard_changed_since_listing_is_refused_and_a_lost_one_gives_bad_samples(tmp_path):
    shard = write_shard(tmp_path / "0.tar", numbered(range(20)))
    source = WebDatasetSource([shard])
    elsewhere, later = (pickle.loads(pickle.dumps(source)) for _ in range(2))
    shard.write_bytes(shard.read_bytes())
    for each in (source, elsewhere):
        with pytest.raises(SourceChangedError, match=f"{shard} was changed"):
            each[19]
    shard.unlink()
    with pytest.raises(BadSampleError, match="cannot be read: No such file"):
        later[0]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_network_disk_that_fails_for_a_moment_costs_no_sample(tmp_path, monkeypatch, number):
    shards = [write_shard(tmp_path / f"{i}.tar", numbered(range(20 * i, 20 * i + 20))) for i in range(2)]
    pread = os.pread

    def pread_of_first(descriptor, count, at):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(shards[1]):
            raise OSError(number, os.strerror(number))
        return pread(descriptor, count, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread_of_first)
        with pytest.raises(OSError, match=f"{os.strerror(number)}: '{shards[1]}'"):
            WebDatasetSource(shards)
    source = WebDatasetSource(shards)
    assert len(source) == 40
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread_of_first)
        with pytest.raises(OSError, match=os.strerror(number)):
            source[20]
    assert source[20].caption == "caption 20"


def test_few_shards_are_open_at_a_time_and_none_when_the_source_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "OPEN_SHARDS", 3)
    shards = [write_shard(tmp_path / f"{i}.tar", numbered([i])) for i in range(8)]
    before = len(os.listdir("/proc/self/fd"))
    source = WebDatasetSource(shards)
    for index in np.random.default_rng(0).integers(0, 8, 50).tolist():
        assert source[index].caption == f"caption {index}"
        assert len(os.listdir("/proc/self/fd")) <= before + 3
    del source
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_sample_gives_the_listing_another_digest(tmp_path):
    def listing(numbers):
        return WebDatasetSource([write_shard(tmp_path / "0.tar", numbered(numbers))]).describe()["listing"]

    assert listing(range(5)) == listing(range(5))
    assert listing(range(5)) != listing(range(6))


def test_an_img2dataset_shard_is_read_with_the_text_beside_the_picture(tmp_path):
    source = WebDatasetSource([img2dataset_shard(tmp_path / "0.tar")])
    assert [source[i].caption for i in range(5)] == ["alt text"] * 5
    assert json.dumps(source.describe())
