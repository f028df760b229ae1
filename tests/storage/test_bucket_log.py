"""A file that grows, and its parts in a bucket: few, and together always the file, whatever is left half-done."""

import os
import random

import pytest

from thermopile.storage import bucket_log
from thermopile.storage.bucket import Address
from thermopile.storage.bucket_log import BucketLog, PartsReader

pytestmark = pytest.mark.wide


@pytest.fixture
def folder(s3, request):
    return Address("bucket", request.node.name) / "metrics"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def parts(folder, file):
    return BucketLog(folder, file)


def append(file, *lines):
    with file.open("ab") as opened:
        opened.writelines(line + b"\n" for line in lines)


def read(folder):
    reader = PartsReader(folder)
    return reader.read(0, reader.size)


def names(folder):
    return [name for name, _, _ in folder.listing()]


def test_the_parts_are_the_file_and_stay_few_however_often_lines_are_added(parts, folder, file, monkeypatch):
    monkeypatch.setattr(bucket_log, "MAX_PART_BYTES", 4_000)
    lengths, most = random.Random(0), 0
    for number in range(150):
        append(file, *(b"%d " % number + b"x" * lengths.randrange(60) for _ in range(lengths.randrange(1, 5))))
        parts.put()
        assert read(folder) == file.read_bytes()
        most = max(most, len(names(folder)))
    assert file.stat().st_size > 12_000
    # A long one for each 2,000 bytes at the worst, and of the rest each at least twice as long as the next.
    assert most <= file.stat().st_size // 2_000 + 11


def test_nothing_new_puts_nothing(parts, folder, file, s3):
    append(file, b"one")
    parts.put()
    with s3.gateway() as gateway:
        parts.put()
        assert gateway.stats()["requests"] == 0


def test_a_line_that_is_being_written_waits_for_its_end(parts, folder, file):
    append(file, b"one")
    with file.open("ab") as opened:
        opened.write(b"tw")
    parts.put()
    assert read(folder) == b"one\n"
    append(file, b"o")
    parts.put()
    assert read(folder) == b"one\ntwo\n"


def test_any_range_is_read_as_from_the_file(parts, folder, file):
    for number in range(20):
        append(file, b"line %d" % number, b"x" * number)
        parts.put()
    append(file, b"the end")
    parts.put()
    reader, whole = PartsReader(folder), file.read_bytes()
    assert len(names(folder)) > 1
    for start, length in ((0, 5), (7, 60), (len(whole) - 9, 100), (3, len(whole)), (len(whole), 4)):
        assert reader.read(start, length) == whole[start : start + length]


@pytest.mark.parametrize("cut", [0, 9, 23, 36, 69, 10_000])
def test_a_resumed_run_goes_on_from_where_the_file_was_cut(folder, file, tmp_path, cut):
    first = BucketLog(folder, file)
    for number in range(8):
        append(file, b"of first %d" % number)
        first.put()
    append(file, b"never put")
    elsewhere = tmp_path / "elsewhere"
    second = BucketLog(folder, elsewhere)
    second.begin(resuming=True, exactly=True)
    assert elsewhere.read_bytes() == file.read_bytes().removesuffix(b"never put\n")
    kept = b"".join(elsewhere.read_bytes().splitlines(keepends=True)[: cut // 11])
    os.truncate(elsewhere, len(kept))
    second.settle()
    assert read(folder)[: len(kept)] == kept
    append(elsewhere, b"of first 9")  # of the same length as a line of the killed run
    second.put()
    assert read(folder) == kept + b"of first 9\n"


def test_a_file_that_was_rewritten_replaces_all_parts(folder, file, tmp_path):
    first = BucketLog(folder, file)
    for number in range(8):
        append(file, b"of first %d" % number)
        first.put()
    second = BucketLog(folder, file)
    second.begin(resuming=True, exactly=True)
    (tmp_path / "new").write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:]))
    (tmp_path / "new").replace(file)
    second.settle()
    append(file, b"more")
    second.put()
    assert read(folder) == file.read_bytes()
    assert names(folder) == ["00000000-000000000000000-000000000000082.part"]


def test_parts_that_were_merged_but_not_yet_deleted_are_passed_over_and_deleted_later(folder, file, tmp_path):
    parts = BucketLog(folder, file)
    append(file, b"a" * 50)
    parts.put()
    append(file, b"b" * 3)
    parts.put()
    merged = folder / "00000000-000000000000051-000000000000055.part"
    left = merged.read_bytes()
    append(file, b"c" * 50)
    parts.put()
    merged.write(left)
    assert read(folder) == file.read_bytes()
    again = BucketLog(folder, tmp_path / "again")
    again.begin(resuming=True, exactly=True)
    append(tmp_path / "again", b"d")
    again.put()
    assert read(folder) == (tmp_path / "again").read_bytes()
    assert merged.name not in names(folder)


def test_local_warnings_that_go_on_from_the_bucket_are_kept_and_others_are_not(folder, file):
    parts = BucketLog(folder, file)
    append(file, b"known")
    parts.put()
    append(file, b"why it ended")
    BucketLog(folder, file).begin(resuming=True)
    assert file.read_bytes() == b"known\nwhy it ended\n"
    file.write_bytes(b"another run\nof the same name\n")
    BucketLog(folder, file).begin(resuming=True)
    assert file.read_bytes() == b"known\n"
    BucketLog(folder, file).begin(resuming=False)
    assert not file.exists()


def test_a_reader_goes_on_when_parts_are_merged_meanwhile(parts, folder, file):
    for lines in (10, 1):
        append(file, *[b"a line"] * lines)
        parts.put()
    readers, size = [PartsReader(folder), PartsReader(folder)], file.stat().st_size
    assert len(names(folder)) == 2
    append(file, *[b"a line"] * 50)
    parts.put()
    assert len(names(folder)) == 1
    assert readers[0].read(0, size) == file.read_bytes()[:size]
    assert readers[1].modified() > 0


def test_a_link_is_not_followed(parts, file, tmp_path):
    (tmp_path / "other").write_bytes(b"mine")
    file.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="is a link"):
        parts.begin(resuming=True)
    assert (tmp_path / "other").read_bytes() == b"mine"
