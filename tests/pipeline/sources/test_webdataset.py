"""Tar shards as webdataset and img2dataset write them: read once, from front to back."""

import errno
import gzip
import io
import json
import os
import pickle
import subprocess
import tarfile

import numpy as np
import pytest
from webdataset.tariterators import group_by_keys, tar_file_expander

from thermopile.pipeline.errors import SourceChangedError, SourceError
from thermopile.pipeline.sources import Account, Asked, BadSample
from thermopile.pipeline.sources import webdataset as module
from thermopile.pipeline.sources.listing import MAX_PICTURE_BYTES
from thermopile.pipeline.sources.webdataset import WebDatasetSource

from support.tars import numbered, reads_of, samples_of, whole, write_members, write_shard


def assert_bad(sample, *words):
    assert isinstance(sample, BadSample)
    for word in words:
        assert word in sample.reason


def test_samples_come_in_the_order_of_the_names_of_the_tars_and_of_each_tar(tmp_path):
    tars = [write_shard(tmp_path / f"{i}.tar", numbered(range(10 * i, 10 * i + 10))) for i in (1, 0)]
    source = WebDatasetSource(tars)
    samples = samples_of(source)
    assert [sample.picture for sample in samples] == [b"pixels %d" % n for n in range(20)]
    assert [sample.caption for sample in samples] == [f"caption {n}" for n in range(20)]
    assert [sample.group for sample in samples] == [str(n % 3) for n in range(20)]
    assert (samples[10].uri, samples[10].key, source.sampled(0).mode) == ("1.tar/000010.jpg", "000010", "pairs")


def test_a_source_index_is_the_tar_and_the_place_in_it(tmp_path):
    source = WebDatasetSource([write_shard(tmp_path / f"{i}.tar", numbered(range(3))) for i in range(2)])
    indices = [read.source_index for read in reads_of(source) if read.sample]
    assert sorted(indices) == [0, 1, 2, 1 << 32, (1 << 32) + 1, (1 << 32) + 2]


def test_samples_are_those_that_webdataset_itself_reads(tmp_path):
    shard = write_members(
        tmp_path / "0.tar",
        ("a/1.jpg", b"a"), ("a/1.txt", b"A"), ("b/1.jpg", b"b"), ("b/1.txt", b"B"),
        ("b/2.JPG", b"c"), ("b/2.txt", b"C"), ("d.x/3.jpg", b"d"), ("d.x/3.txt", b"D"),
        ("./4.tar.gz", b"-"), ("./4.jpg", b"e"), ("./4.txt", b"E"), ("plain", b"-"), (".hidden.jpg", b"-"),
        ("__meta__/1.jpg", b"-"), ("caf\xe9.jpg", b"f"), ("caf\xe9.txt", b"F"),
    )  # fmt: skip
    with shard.open("rb") as file:
        theirs = list(group_by_keys(tar_file_expander([{"url": "0.tar", "stream": file}])))
    expected = [(sample["__key__"], sample["jpg"], sample["txt"].decode()) for sample in theirs]
    assert len(expected) == 6
    ours = samples_of(WebDatasetSource([shard]))
    assert [(sample.key, sample.picture, sample.caption) for sample in ours] == expected


def test_a_key_that_comes_again_is_another_sample(tmp_path):
    members = [("1.jpg", b"a"), ("1.txt", b"A"), ("1.jpg", b"b"), ("1.txt", b"B"), ("2.jpg", b"c"), ("2.txt", b"C"),
               ("1.jpg", b"d"), ("1.txt", b"D")]  # fmt: skip
    samples = samples_of(WebDatasetSource([write_members(tmp_path / "0.tar", *members)]))
    assert [(sample.picture, sample.caption) for sample in samples] == [
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
    samples = samples_of(source)
    assert (samples[0].caption, samples[0].group) == ("a dog", "7")
    assert (samples[2].captions, samples[2].group) == (("a cat", "a pet"), "x")
    assert samples[8].captions == ("b",)
    for index, reason in ((1, "no caption"), (3, "'caption' of the .json member is a dict"), (4, "no caption"),
                          (5, "entry 2 of 'caption' of the .json member is a int, not text; write it as a string"),
                          (6, "no caption"), (7, "no caption"), (9, "no caption")):  # fmt: skip
        assert_bad(samples[index], reason)
    assert source.sampled(0).captions == ["a dog", "a cat", "a pet", "b"]
    assert source.counted()[1].names == ("", "3", "7", "x")


def test_each_line_of_a_text_member_is_a_caption(tmp_path):
    texts = [b"\xef\xbb\xbfa dog\r\nan animal \n\n", b" \n\n", b"\n".join(b"%d" % n for n in range(65)), b"one\n\xff"]
    members = [
        (f"{n}.{suffix}", data) for n, text in enumerate(texts) for suffix, data in (("jpg", b"x"), ("txt", text))
    ]
    source = WebDatasetSource([write_members(tmp_path / "0.tar", *members)])
    first, *others = samples_of(source)
    assert first.captions == ("a dog", "an animal")
    for sample, reason in zip(others, ("no caption", "65 captions, above 64", "not UTF-8"), strict=True):
        assert_bad(sample, reason)
    assert source.sampled(0).captions == ["a dog", "an animal"]


@pytest.mark.parametrize("text", [b"{", b"[1]", b"[" * 100_000, b"\xff\xfe", b'{"caption": %s}' % (b"9" * 5000), b"7"])
def test_invalid_json_is_a_bad_sample(tmp_path, text):
    sound = ("0.jpg", b"x"), ("0.json", b'{"caption": "a dog"}')
    source = WebDatasetSource([write_members(tmp_path / "0.tar", *sound, ("1.jpg", b"x"), ("1.json", text))],
                              caption="json:caption")  # fmt: skip
    _, sample = samples_of(source)
    assert_bad(sample, "the .json member cannot be read")


@pytest.mark.parametrize(
    ("option", "json", "reason"),
    [
        (
            "json:WRONG",
            b'{"caption": "a dog", "url": 7}',
            r"no caption; .*; the fields of its .json member: 'caption', 'url'",
        ),
        (
            "json:caption",
            b'{"caption": {"en": "a dog"}}',
            r"entry 1 of 'caption' of the .json member is a dict, not text; .*'caption'",
        ),
        ("json:caption", b"not json", "the .json member cannot be read"),
        ("json:caption", b'{"caption": " "}', "no caption"),
    ],
)
def test_captions_that_no_sample_has_are_refused_before_work_begins(tmp_path, option, json, reason):
    shard = write_members(tmp_path / "0.tar", ("0.jpg", b"x"), ("0.json", json), ("1.jpg", b"x"), ("1.json", json))
    with pytest.raises(
        SourceError, match=rf"--caption '{option}' gives none of 2 samples a caption; the first: {reason}"
    ):
        WebDatasetSource([shard], caption=option).facts(Asked())


DOTS = [(f"p{dots}.{kind}", f"{kind}{dots}".encode()) for dots in ("", ".1", ".2") for kind in ("jpg", "txt")]


def test_members_that_no_sample_uses_are_told_and_a_key_may_end_at_the_last_dot(tmp_path):
    shard = write_members(
        tmp_path / "0.tar", *DOTS, ("q.jpg", b"x"), ("q.txt", b"q"), ("q.json", b"{}"), ("q.npy", b"0")
    )
    by_rule, by_last = WebDatasetSource([shard]), WebDatasetSource([shard], key_by="last-dot")
    assert [sample.caption for sample in samples_of(by_rule)] == ["txt", "q"]
    assert [sample.caption for sample in samples_of(by_last)] == ["txt", "txt.1", "txt.2", "q"]
    assert [sample.key for sample in samples_of(by_last)] == ["p", "p.1", "p.2", "q"]
    json = "members that end in .json", "q.json", "--caption json:FIELD"
    others = [(f"members that end in .{name[-3:]}", name, "--key-by last-dot") for name, _ in DOTS[2:]]
    assert [found for read in by_rule.from_start(0) for found in read.unused] == [*others, json]
    assert [found for read in by_last.from_start(0) for found in read.unused] == [json]
    assert "key_by" not in by_rule.describe()
    assert by_last.describe()["key_by"] == "last-dot"


def test_a_dot_before_the_suffix_is_named_where_it_hides_a_picture(tmp_path):
    shard = write_members(tmp_path / "0.tar", ("a.jpg", b"x"), ("Mr. T 1.jpg", b"x"))
    assert_bad(samples_of(WebDatasetSource([shard]))[1], "a key ends at its name's first dot; use --key-by last-dot")


JPG, TXT = ("a.jpg", b"x"), ("a.txt", b"A")


@pytest.mark.parametrize(
    ("members", "left_out", "unused"),
    [
        ([JPG, TXT, ("a.json", b"{}"), ("a.npy", b"")], {}, {"json": "--caption json:FIELD"}),  # img2dataset's
        ([JPG, TXT, ("a.seg.png", b"s"), ("a.bbox.json", b"[]")], {},
         {"png": "--key-by last-dot", "json": "--key-by last-dot"}),
        ([JPG, TXT, ("a.png", b"y")], {}, {"png": "--image"}),
        ([JPG, TXT, ("a.caption", b"B"), ("a.mp4", b"")], {}, {"caption": "--caption caption"}),
        ([JPG, TXT, ("a.heic", b"h")], {}, {"heic": "--image"}),
        ([JPG, TXT, ("b.heic", b"h"), ("b.txt", b"B")],
         {"b": "in jpg;jpeg;png;webp; use --image heic"}, {"heic": "--image"}),
        ([JPG, TXT, ("Mr. T 1.jpg", b"x"), ("Mr. T 1.txt", b"x")], {"Mr": "--key-by last-dot"},
         {"jpg": "--key-by last-dot", "txt": "--key-by last-dot"}),
        ([JPG, ("b.jpg", b"y"), TXT, ("b.txt", b"B"), ("c.jpg", b"z"), ("c.txt", b"C")],
         {"a": "tar --sort=name", "b": "tar --sort=name"}, {}),
        ([("set/v1.0/a.jpg", b"x"), ("set/v1.0/a.txt", b"A"), ("./b.JPG", b"y"), ("./b.TXT", b"B")], {}, {}),
        ([JPG, TXT, ("__meta__/1.json", b"{}")], {}, {}),
        ([JPG, TXT, ("b.jpg", b"y"), ("b.txt", b" \n")], {"b": "no caption; add one"}, {}),
        ([JPG, TXT, ("b.jpg", b"y"), ("b.txt", b"caf\xe9")], {"b": "not UTF-8"}, {}),
    ],
)  # fmt: skip
def test_of_tars_as_other_tools_write_them_each_member_is_used_left_out_or_told(tmp_path, members, left_out, unused):
    source = WebDatasetSource([write_members(tmp_path / "0.tar", *members)])
    reads = [read for read in reads_of(source, mode=source.sampled(0).mode) if read.sample is not None]
    bad = {read.sample.key: read.sample.reason for read in reads if isinstance(read.sample, BadSample)}
    assert bad.keys() == left_out.keys()
    assert all(words in bad[key] for key, words in left_out.items())
    assert {kind.rpartition(".")[2]: cure for read in reads for kind, _, cure in read.unused} == unused


@pytest.mark.parametrize("key_by", ["first-dot", "last-dot"])
def test_members_that_belong_to_no_sample_are_counted_once_however_a_tar_is_cut(tmp_path, key_by):
    members = [("README", b"r"), ("in/._a.jpg", b"m"), JPG, TXT, (".b.jpg", b"m"), ("b.jpg", b"x"), ("b.txt", b"B")]
    source = WebDatasetSource([write_members(tmp_path / "0.tar", *members, ("._c", b"m"))], key_by=key_by)
    for pieces in ([whole(source, 0)], source._cut(whole(source, 0), 2)):
        told = Account()
        for read in reads_of(source, *pieces):
            for each in read.unused:
                told.add(*each)
        assert told == {"members without a suffix": (1, "README", ""), "hidden members": (3, "in/._a.jpg", "")}
    assert [sample.key for sample in samples_of(source)] == ["a", "b"]


def test_of_a_folder_hidden_tars_are_not_read_and_packed_ones_are_told_with_the_cure(tmp_path):
    for folder in ("train", "packed"):
        (tmp_path / folder).mkdir()
    write_members(tmp_path / "train" / "0.tar", JPG, TXT)
    for name in ("train/._0.tar", "train/00000.parquet", "train/00000_stats.json", "packed/1.tar.gz", "packed/2.tgz"):
        (tmp_path / name).touch()
    source = WebDatasetSource([tmp_path])
    assert len(samples_of(source)) == 1
    assert {kind: (each.number, each.cure) for kind, each in source.unused.items()} == {
        "hidden files": (1, ""), "files that end in .parquet": (1, ""), "files that end in .json": (1, ""),
        "files that end in .gz": (1, "unpack them"), "files that end in .tgz": (1, "unpack them"),
    }  # fmt: skip
    with pytest.raises(
        SourceError, match=r"no tar files to read; 1 × files that end in \.t?gz, such as .*: unpack them"
    ):
        WebDatasetSource([tmp_path / "packed"])


def test_links_in_a_tar_of_gnu_tar_are_left_out_and_the_cure_packs_their_files(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"x")
    os.link(tmp_path / "in" / "a.jpg", tmp_path / "in" / "b.jpg")
    (tmp_path / "in" / "c.jpg").symlink_to("a.jpg")

    def found(*options):
        command = ["tar", "--sort=name", *options, "-cf", str(tmp_path / "0.tar"), "-C", str(tmp_path / "in"), "."]
        subprocess.run(command, check=True)
        return [isinstance(sample, BadSample) for sample in samples_of(WebDatasetSource([tmp_path / "0.tar"]))]

    assert found() == [False, True, True]
    assert found("--dereference", "--hard-dereference") == [False] * 3


def test_the_first_of_several_suffixes_that_a_sample_has_is_its_picture(tmp_path):
    shard = write_members(tmp_path / "0.tar", ("1.png", b"png"), ("1.jpg", b"jpg"), ("2.png", b"png"))
    samples = samples_of(WebDatasetSource([shard]))
    assert [(sample.picture, sample.uri) for sample in samples] == [(b"jpg", "0.tar/1.jpg"), (b"png", "0.tar/2.png")]
    assert samples_of(WebDatasetSource([shard], image="png"))[0].picture == b"png"


def test_without_any_caption_and_where_none_is_wanted_it_is_images_alone(tmp_path):
    bare = WebDatasetSource([write_members(tmp_path / "0.tar", ("1.jpg", b"x"), ("2.jpg", b"y"))])
    assert (samples_of(bare)[0].caption, bare.sampled(0).mode, bare.counted()[1]) == (None, "images", None)
    unwanted = WebDatasetSource([write_shard(tmp_path / "1.tar", numbered(range(2)))], caption=None, group=None)
    first = samples_of(unwanted)[0]
    assert (unwanted.sampled(0).mode, first.caption, first.group) == ("images", None, None)


def test_a_sample_without_a_picture_or_a_caption_is_a_bad_sample(tmp_path):
    members = [
        ("1.jpg", b"x"),
        ("1.txt", b"A"),
        ("2.txt", b"B"),
        ("3.jpg", b"z"),
        ("4.jpg", b"z"),
        ("4.txt", b"caf\xe9"),
    ]
    samples = samples_of(WebDatasetSource([write_members(tmp_path / "0.tar", *members)]))
    for index, reason in ((1, "no picture: no member of its key ends in jpg"), (2, "no caption"), (3, "not UTF-8")):
        assert_bad(samples[index], reason)
    assert [sample.uri for sample in samples] == ["0.tar/1.jpg", "0.tar/2.txt", "0.tar/3.jpg", "0.tar/4.jpg"]


def test_a_tar_cut_short_gives_what_is_before_the_cut_and_says_where_it_is_cut(tmp_path):
    members = [(f"{n}.{suffix}", b"%d" % n * 700) for n in range(4) for suffix in ("jpg", "txt")]
    complete = write_members(tmp_path / "whole.tar", *members)
    cut = tmp_path / "cut.tar"
    cut.write_bytes(complete.read_bytes()[: 5 * 1536 + 600])  # within 2.txt; a member is a header and two blocks
    samples = samples_of(WebDatasetSource([cut, complete]))
    assert [sample.key for sample in samples] == ["0", "1", "2", "", "0", "1", "2", "3"]
    assert [samples[i].caption[0] for i in (0, 1, 4, 5, 6, 7)] == ["0", "1", "0", "1", "2", "3"]
    assert_bad(samples[2], "no caption")
    assert_bad(samples[3], "cut short after 8,280 bytes, in b'2.txt'")
    assert samples[3].uri == "cut.tar"


def test_a_tar_may_be_cut_short_in_the_padding_after_a_member_that_nobody_wants(tmp_path, monkeypatch):
    monkeypatch.setattr("thermopile.pipeline.sources.source_file.AHEAD_BYTES", 1024)
    data = write_members(tmp_path / "0.tar", ("1.jpg", b"x"), ("1.txt", b"A"), ("1.bin", b"b" * 1500)).read_bytes()
    (tmp_path / "0.tar").write_bytes(data[: 3 * 512 + 1024 + 1500])
    sample, rest = samples_of(WebDatasetSource([tmp_path / "0.tar"]))
    assert sample.caption == "A"
    assert_bad(rest, "without an end mark")


def test_a_tar_damaged_in_its_middle_is_said_to_be(tmp_path):
    shard = write_shard(tmp_path / "0.tar", numbered(range(20)))
    data = bytearray(shard.read_bytes())
    data[20 * 512 : 40 * 512] = b"x" * (20 * 512)
    shard.write_bytes(data)
    *before, last = samples_of(WebDatasetSource([shard]))
    assert_bad(last, "its header at byte 10,240 is damaged")
    assert [sample.key for sample in before] == ["000000", "000001", "000002", "000003"]


def test_where_no_tar_can_be_read_the_first_ones_reason_is_given(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    (tmp_path / "text.tar").write_text("hello" * 1000)
    (tmp_path / "empty.tar").touch()
    write_members(tmp_path / "nothing.tar")
    for name, reason in (("text.tar", "not a tar archive"), ("empty.tar", "the file is empty"),
                         ("pipe.tar", "the file is empty"), ("nothing.tar", "empty")):  # fmt: skip
        with pytest.raises(SourceError, match=f"no sample in 1 of 1 tars; the first, {tmp_path / name}.*{reason}"):
            WebDatasetSource([tmp_path / name]).sampled(0)
    with pytest.raises(FileNotFoundError):
        WebDatasetSource([tmp_path / "gone.tar"])
    with pytest.raises(SourceError, match="no tar"):
        WebDatasetSource([])


def test_a_tar_that_cannot_be_read_is_one_line_beside_the_others_samples(tmp_path):
    write_shard(tmp_path / "0.tar", numbered(range(2)))
    (tmp_path / "1.tar").write_text("hello" * 1000)
    (tmp_path / "2.tar").touch()
    write_members(tmp_path / "3.tar")  # has no samples, and is not damaged
    first, second, text, empty = samples_of(WebDatasetSource([tmp_path]))
    assert (first.key, second.key, text.uri, empty.uri) == ("000000", "000001", "1.tar", "2.tar")
    assert_bad(text, "not a tar archive")
    assert_bad(empty, "the file is empty")


def test_a_compressed_tar_is_answered_with_the_cure(tmp_path):
    tar = write_shard(tmp_path / "0.tar", numbered(range(2)))
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(tar.read_bytes()))
    source = WebDatasetSource([tmp_path / "0.tar.gz"])
    for read in (lambda: source.sampled(0), source.counted, lambda: reads_of(source)):
        with pytest.raises(SourceError, match=r"is compressed, .* run gunzip on it"):
            read()


def test_names_that_lead_elsewhere_are_only_text_and_links_are_left_out_with_the_cure(tmp_path, monkeypatch):
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
    *samples, symbolic, hard = samples_of(WebDatasetSource([shard]))
    assert [sample.picture for sample in samples] == [b"evil", b"evil"]
    assert [sample.uri for sample in samples] == ["0.tar/../../evil.jpg", "0.tar//tmp/evil.jpg"]
    for link in (symbolic, hard):
        assert_bad(link, "a link; pack the files in its place, with `tar --dereference --hard-dereference`")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0.tar", "here"]


def sparse_tar(path, size):
    """A tar of one picture of this many zeros, which take no room on a disk."""
    header = tarfile.TarInfo("1.jpg")
    header.size = size
    with path.open("wb") as tar:
        tar.write(header.tobuf())
        tar.truncate(512 + -(-size // 512) * 512 + 1024)
    return path


def test_a_member_too_large_for_a_picture_is_a_bad_sample_and_not_read(tmp_path, monkeypatch):
    source = WebDatasetSource([sparse_tar(tmp_path / "0.tar", MAX_PICTURE_BYTES + 1)])
    read = list[int]()
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, at: read.append(count) or pread(file, count, at))
    (sample,) = samples_of(source)
    assert_bad(sample, "268,435,457 bytes, above 268,435,456")
    assert sum(read) < 128 << 20  # the beginning, and what is read ahead


def test_a_tar_changed_or_lost_since_listing_is_refused(tmp_path):
    shard = write_shard(tmp_path / "0.tar", numbered(range(20)))
    source = WebDatasetSource([shard])
    elsewhere, later = (pickle.loads(pickle.dumps(source)) for _ in range(2))
    shard.write_bytes(shard.read_bytes())
    for each in (source, elsewhere, later):
        with pytest.raises(SourceChangedError, match=f"{shard} was changed"):
            reads_of(each)
        if each is elsewhere:
            shard.unlink()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_network_disk_that_fails_for_a_moment_costs_no_sample(tmp_path, monkeypatch, number):
    tars = [write_shard(tmp_path / f"{i}.tar", numbered(range(20 * i, 20 * i + 20))) for i in range(2)]
    source, pread = WebDatasetSource(tars), os.pread

    def pread_of_first(descriptor, count, at):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tars[1]):
            raise OSError(number, os.strerror(number))
        return pread(descriptor, count, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread_of_first)
        for read in (lambda: source.sampled(0), source.counted, lambda: source.starts(1), lambda: reads_of(source)):
            with pytest.raises(OSError, match=f"{os.strerror(number)}: '{tars[1]}'"):
                read()
    assert samples_of(source)[20].caption == "caption 20"


def open_below(folder):
    links = (f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith(str(folder)) for link in links)


def test_one_tar_is_open_at_a_time_and_none_at_the_end(tmp_path):
    source = WebDatasetSource([write_shard(tmp_path / f"{i}.tar", numbered([i])) for i in range(8)])
    opened = list[int]()
    for tar in range(8):
        opened += [open_below(tmp_path) for _ in source._in_order(whole(source, tar), "", None)]
    assert (max(opened), open_below(tmp_path)) == (1, 0)


def test_another_size_gives_the_listing_another_digest_and_another_time_another_mark(tmp_path):
    def listed(samples, time):
        os.utime(write_shard(tmp_path / "0.tar", numbered(range(samples))), (time, time))
        source = WebDatasetSource([tmp_path / "0.tar"])
        return source.describe()["listing"], source.marks()["0.tar"]

    (first, mark), (again, later_mark), (larger, _) = listed(5, 1), listed(5, 2), listed(50, 1)
    assert (first, mark != later_mark) == (again, True)
    assert first != larger


def test_an_img2dataset_shard_is_read_with_the_text_beside_the_picture(tmp_path):
    source = WebDatasetSource([img2dataset_shard(tmp_path / "0.tar")])
    assert [sample.caption for sample in samples_of(source)[:5]] == ["alt text"] * 5
    assert json.dumps(source.describe())


def test_samples_are_counted_with_their_classes_and_a_damaged_rest_counts_as_one(tmp_path):
    write_shard(tmp_path / "0.tar", numbered(range(4)))
    (tmp_path / "1.tar").write_bytes(write_shard(tmp_path / "x", numbered(range(3))).read_bytes()[: 6 * 1024])
    source, told = WebDatasetSource([tmp_path]), []
    counts, groups = source.counted(told.append)
    assert told == ["counting samples and classes of 2 of 2 tars …"]
    assert counts.tolist() == [4, 3]  # the second ends between two samples, but without a tar's end
    assert [groups.names[k] for k in groups.of_sample] == ["0", "1", "2", "0", "0", "1", ""]
    assert len([read for read in reads_of(source) if read.sample]) == counts.sum()


# Windows.


def kept(reads):
    return [read.sample.key for read in reads if read.sample]


def test_samples_are_mixed_within_windows_which_need_not_end_with_a_tar(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WINDOW_ROWS", 8)
    source = WebDatasetSource([write_shard(tmp_path / f"{i}.tar", numbered(range(6 * i, 6 * i + 6))) for i in range(4)])
    keys = [int(key) for key in kept(reads_of(source))]
    windows = [keys[start : start + 8] for start in (0, 8, 16)]
    assert [sorted(window) for window in windows] == [[*range(8)], [*range(8, 16)], [*range(16, 24)]]
    assert all(window != sorted(window) for window in windows)
    assert keys == [int(key) for key in kept(reads_of(source))]
    assert keys != [int(key) for key in kept(reads_of(source, seed=1))]
    assert keys != [int(key) for key in kept(reads_of(source, number=1))]


def test_a_window_holds_few_bytes_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WINDOW_BYTES", 40_000)
    samples = [{"__key__": f"{n:06}", "jpg": b"%05d" % n * 2_000} for n in range(20)]
    source = WebDatasetSource([write_shard(tmp_path / "0.tar", samples)])
    keys = [int(key) for key in kept(reads_of(source))]
    assert [sorted(keys[start : start + 4]) for start in range(0, 20, 4)] == [
        [*range(start, start + 4)] for start in range(0, 20, 4)
    ]


def test_progress_counts_every_byte_of_every_tar(tmp_path):
    write_shard(tmp_path / "0.tar", numbered(range(5)))
    (tmp_path / "1.tar").write_bytes((tmp_path / "0.tar").read_bytes()[:5000])
    source = WebDatasetSource([tmp_path])
    reads = reads_of(source)
    assert sum(read.done for read in reads) == source.sizes().sum()
    assert sum(read.files for read in reads) == 2


def test_only_the_selected_samples_are_yielded_and_the_others_still_count_as_read(tmp_path):
    source = WebDatasetSource([write_shard(tmp_path / "0.tar", numbered(range(5)))])
    reads = reads_of(source, selected=[np.array([True, False, False, True, False])])
    assert sorted(kept(reads)) == ["000000", "000003"]
    assert sum(read.done for read in reads) == source.sizes().sum()


# What is read beforehand.


def test_a_caption_in_the_sample_makes_pairs_and_none_makes_images_and_later_captions_are_ignored(tmp_path):
    bare = [{"__key__": f"{n}", "jpg": b"x"} for n in range(3)]
    write_shard(tmp_path / "0.tar", [*bare, {"__key__": "last", "jpg": b"x", "txt": "late"}])
    source = WebDatasetSource([tmp_path])
    assert source.sampled(0).mode == "pairs"
    # As if the beginnings of the tars had none.
    reads = [read for read in reads_of(source, mode="images") if read.sample]
    assert [read.sample.caption for read in reads] == [None] * 4
    assert sorted((read.sample.key, read.ignored) for read in reads) == [
        ("0", False), ("1", False), ("2", False), ("last", True),
    ]  # fmt: skip


def test_of_many_tars_the_beginnings_of_some_are_read_which_the_seed_chooses(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLED_BYTES", 80_000)
    monkeypatch.setattr(module, "SAMPLED_TAR_BYTES", 20_000)
    monkeypatch.setattr(module, "SAMPLED_SHARE", 0)
    for tar in range(12):
        write_shard(tmp_path / f"{tar:02}.tar", [{"__key__": f"{n}", "jpg": bytes(4_000), "txt": f"{tar} {n}"}
                                                 for n in range(20)])  # fmt: skip
    read, read_piece = [], module.SourceFile.read_piece
    monkeypatch.setattr(
        module.SourceFile,
        "read_piece",
        lambda file, at, count: read.append((file.place.name, at, count)) or read_piece(file, at, count),
    )

    def captions(seed):
        source, told = WebDatasetSource([tmp_path]), []
        found = source.sampled(seed, told.append)
        assert told == ["reading a sample of 4 of 12 tars …"]
        assert found is source.sampled(seed)  # once
        assert (found.samples, found.with_caption, found.with_group) == (12, 12, 0)
        return found.captions

    first = captions(0)
    assert len(read) == len({name for name, _, _ in read}) == 4
    assert all((at, count) == (0, 20_000) for _, at, count in read)
    assert first == captions(0) != captions(1)


def test_a_first_sample_larger_than_what_is_read_of_a_tar_still_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLED_BYTES", 30_900)
    monkeypatch.setattr(module, "SAMPLED_TAR_BYTES", 10_300)  # ends within a header
    for tar in range(3):
        large = {"__key__": "0", "jpg": bytes(512 * 18 if tar else 50_000), "txt": "large"}
        write_shard(tmp_path / f"{tar}.tar", [large, {"__key__": "1", "jpg": b"", "txt": "later"}])
    source = WebDatasetSource([tmp_path])
    found = source.sampled(0)
    assert (found.mode, found.captions) == ("pairs", ["large"] * 3)


@pytest.mark.parametrize("option", ["caption", "group"])
def test_a_name_asked_for_that_no_sample_has_is_refused(tmp_path, option):
    shard = write_shard(tmp_path / "0.tar", numbered(range(3)))
    source = WebDatasetSource([shard], required=(option,), **{option: "text"})
    with pytest.raises(SourceError, match=f"--{option} 'text' matches none of 3 samples read; choose another, or none"):
        source.sampled(0)


def test_a_worker_gets_the_source_with_its_versions(tmp_path):
    source = WebDatasetSource([write_shard(tmp_path / "0.tar", numbered(range(3)))])
    source.sampled(0)
    copy = pickle.loads(pickle.dumps(source))
    assert (copy.describe(), copy.marks()) == (source.describe(), source.marks())
    assert reads_of(copy) == reads_of(source)
