"""Reading a file that somebody else named."""

import errno
import os

import pytest

from thermopile.pipeline.errors import BadSampleError
from thermopile.pipeline.sources.listing import MAX_PICTURE_BYTES, estimated_bytes, read_regular_file


def test_a_chain_of_links_to_a_file_is_followed(tmp_path):
    (tmp_path / "file").write_bytes(b"pixels")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "again").symlink_to("link")
    assert read_regular_file(os.fsencode(tmp_path / "again")) == b"pixels"


def test_anything_but_a_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for name, reason in (("pipe", "not a regular"), ("", "not a regular"), ("circle", "symbolic links"),
                         ("gone", "No such file"), ("a\0b", "not the name"), ("a" * 300, "too long")):  # fmt: skip
        with pytest.raises(BadSampleError, match=reason):
            read_regular_file(os.fsencode(tmp_path) + b"/" + name.encode())
    with pytest.raises(BadSampleError, match="not a regular file"):
        read_regular_file(b"/dev/zero")


def test_a_file_too_large_for_a_picture_is_refused_unread(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_PICTURE_BYTES + 1)
    with pytest.raises(BadSampleError, match="268,435,457 bytes"):
        read_regular_file(os.fsencode(tmp_path / "large"))


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
