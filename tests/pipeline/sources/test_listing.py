"""Names, captions and classes of a listing."""

import errno
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermopile.pipeline import sources
from thermopile.pipeline.errors import BadSampleError
from thermopile.pipeline.sources.listing import (
    MAX_CAPTION_BYTES,
    caption_texts,
    estimated_bytes,
    groups_by_name,
    listing_digest,
    names_below_common_folder,
    read_regular_file,
)


def names(*values):
    return pa.array(values, pa.large_binary())


def test_files_are_told_apart_by_no_more_of_their_folders_than_that_takes():
    files = [Path("/data/train/0.tar"), Path("/data/more/train/0.tar")]
    assert names_below_common_folder(files) == ["train/0.tar", "more/train/0.tar"]
    assert names_below_common_folder(files[:1]) == ["0.tar"]


def test_classes_are_sorted_and_numbers_by_their_value():
    assert groups_by_name([names(b"b", b"a", b"", b"b")]).names == ("", "a", "b")
    assert groups_by_name([names(b"10", b"9", b"", b"100")]).names == ("", "9", "10", "100")
    assert groups_by_name([names(b"10", b"9", b"x")]).names == ("10", "9", "x")


@given(st.lists(st.lists(st.sampled_from(["", "1", "2", "10", "x", "é"]))))
def test_every_sample_keeps_its_class(parts):
    values = [value for part in parts for value in part]
    groups = groups_by_name([names(*(value.encode() for value in part)) for part in parts])
    if not any(values):
        assert groups is None
    else:
        assert [groups.names[place] for place in groups.of_sample] == values


def test_memory_for_classes_does_not_grow_with_the_length_of_their_names():
    held = []

    def parts():
        for _ in range(50):
            held.append(pa.total_allocated_bytes())
            yield names(*[b"the name of a class " * 10] * 1000)

    groups_by_name(parts())
    assert max(held) - held[0] < 1_000_000  # a part has 200,000


def test_a_caption_is_text_without_the_white_space_around_it():
    assert caption_texts(["\ufeffa café\n".encode(), " two\nlines "]) == ("a café", "two\nlines")


def test_the_reason_says_why_a_caption_is_refused():
    for raw, reason in ((None, "no caption"), (b" \n", "no caption"), (b"caf\xe9", "UTF-8"), ("half \ud800", "UTF-8"),
                        ("x" * (MAX_CAPTION_BYTES + 1), "above 1,048,576")):  # fmt: skip
        with pytest.raises(BadSampleError, match=reason):
            caption_texts([raw])


@given(st.lists(st.binary()), st.lists(st.binary()))
def test_two_listings_have_the_same_digest_exactly_when_they_are_the_same(one, other):
    assert (listing_digest(names(*one)) == listing_digest(names(*other))) == (one == other)


def test_a_digest_does_not_depend_on_how_the_columns_lie_in_memory():
    whole = names(b"a", b"bc", b"", b"def")
    numbers = np.arange(8)
    assert listing_digest(whole[1:3], numbers[::2]) == listing_digest(names(b"bc", b""), numbers[::2].copy())
    assert listing_digest(whole[:0]) == listing_digest(names())


def test_many_files_share_marks_with_their_neighbours_and_each_change_shows(monkeypatch):
    monkeypatch.setattr(sources, "MAX_MARKS", 4)
    versions = [(100, number) for number in range(10)]
    marks = sources.marks_of("{}.tar".format, versions)
    assert list(marks) == ["0.tar … 2.tar", "3.tar … 5.tar", "6.tar … 8.tar", "9.tar"]
    for number in range(10):
        other = [*versions]
        other[number] = (101, number)
        changed = dict(sources.marks_of("{}.tar".format, other).items() - marks.items())
        assert list(changed) == [list(marks)[number // 3]]
    assert len(sources.marks_of("{}.tar".format, versions[:4])) == 4
    assert sources.marks_of("{}.tar".format, ()) == {}


def test_the_size_of_many_files_is_estimated_and_lost_files_count_nothing(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 100)
    (tmp_path / "large").write_bytes(b"x" * 300)
    names = [b"small", b"large", b"gone", b"a\0b"]
    asked = []

    def name_of(index):
        asked.append(index)
        return names[index % 4]

    assert estimated_bytes(tmp_path, name_of, 1_000_000) == pytest.approx(100 * 1_000_000, rel=0.15)
    assert len(asked) == 1000
    assert estimated_bytes(tmp_path, name_of, 2) == 400


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_network_disk_that_fails_is_no_bad_sample(tmp_path, monkeypatch, number):
    def fail(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("thermopile.pipeline.sources.listing.open_regular", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        read_regular_file(os.fsencode(tmp_path / "x"))
