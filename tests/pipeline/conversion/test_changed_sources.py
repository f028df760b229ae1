"""A source that is changed while it is converted: its old and its new samples are never mixed in a dataset."""

import os
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.errors import DatasetExistsError, SourceError
from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.storage.bucket import Address

from support.cli import cli
from support.conversions import convert_part, digests, finish, many_shards
from support.kinds import OPEN, PICTURES, write
from support.pictures import as_bytes, draw


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    many_shards(monkeypatch, rows=15)


@pytest.fixture(scope="module")
def jpegs():
    """Two versions of each picture."""
    return [[as_bytes(draw(number + first), "JPEG") for number in range(PICTURES)] for first in (0, 1000)]


# Picture 07 is in a shard of the second part.
CHANGED = [("folder", "pictures/07.jpg"), ("csv", "pictures/07.jpg"), ("csv", "list.csv"), ("webdataset", "1.tar"),
           ("parquet", "1.parquet")]  # fmt: skip


class Sources:
    """One of the kinds of source, in a folder or below an address."""

    def __init__(self, kind, root, jpegs):
        self._kind, (self._files, self._open) = kind, OPEN[kind]
        self.root, self._jpegs = root, jpegs
        for name, data in self._files(jpegs[0], "claws").items():
            write(root / name, data)

    def listed(self):
        return self._open(self.root)

    def change(self, name):
        """Give a file another content that its listing does not tell of."""
        if isinstance(self.root, Address) and self._kind == "csv" and name.endswith(".jpg"):
            time.sleep(1)  # a store has the times of objects in whole seconds
        jpegs = self._jpegs[1] if name.endswith(".jpg") else self._jpegs[0]
        write(self.root / name, self._files(jpegs, "tails")[name])

    def part(self, out, number, count=2):
        return convert_part(self.listed(), out, ConvertSettings(), number, count, workers=1)

    def whole(self, out, **options):
        return convert(self.listed(), out, ConvertSettings(), workers=1, **options)

    def finish(self, out):
        return finish(self.listed(), out, ConvertSettings())


def refused(name):
    """One line that names the file, and what to remove."""
    line = rf"^[^\n]*{name} (has|was) changed[^\n]*remove [^\n]*out[^\n]*$"
    return pytest.raises((DatasetExistsError, SourceError), match=line)


@pytest.mark.parametrize(("kind", "changed"), CHANGED)
def test_a_source_that_changed_between_two_parts_is_refused_naming_the_file(kind, changed, tmp_path, jpegs):
    sources = Sources(kind, tmp_path / "in", jpegs)
    sources.part(tmp_path / "out", 1)
    sources.change(changed)
    with refused(Path(changed).name):
        sources.part(tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.wide
@pytest.mark.parametrize("to_bucket", [False, True])
@pytest.mark.parametrize(("kind", "changed"), CHANGED)
def test_objects_that_changed_between_two_parts_are_refused_naming_one(kind, changed, to_bucket, tmp_path, jpegs, s3):
    root = Address("bucket", f"{kind}-{changed}-{to_bucket}")
    sources, out = Sources(kind, root / "in", jpegs), root / "out" if to_bucket else tmp_path / "out"
    sources.part(out, 1)
    sources.change(changed)
    with refused(Path(changed).name):
        sources.part(out, 2)
    assert not (out / "dataset.json").exists()


def test_a_source_that_changed_after_its_last_part_is_not_finished(tmp_path, jpegs):
    sources = Sources("webdataset", tmp_path / "in", jpegs)
    sources.part(tmp_path / "out", 1, 1)
    sources.change("1.tar")
    with refused(r"1\.tar"):
        sources.finish(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.wide
def test_pictures_in_a_bucket_are_told_by_their_etags_before_they_are_read(tmp_path, jpegs, s3):
    sources = Sources("folder", Address("bucket", "etags"), [jpegs[0], [data[:-1] + b"\0" for data in jpegs[0]]])
    sources.part(tmp_path / "out", 1, 1)
    sources.change("pictures/07.jpg")
    with refused(r"07\.jpg"):
        sources.finish(tmp_path / "out")


def test_a_picture_replaced_by_an_older_file_is_refused(tmp_path, jpegs):
    sources = Sources("folder", tmp_path / "in", jpegs)
    sources.part(tmp_path / "out", 1)
    (tmp_path / "old").write_bytes(jpegs[1][7])
    os.utime(tmp_path / "old", (0, 0))
    (tmp_path / "old").rename(tmp_path / "in" / "pictures" / "07.jpg")
    with refused(r"07\.jpg"):
        sources.part(tmp_path / "out", 2)


def test_a_picture_beside_a_table_that_changed_is_refused(tmp_path, jpegs):
    for i, jpeg in enumerate(jpegs[0]):
        write(tmp_path / "in" / f"{i:02d}.jpg", jpeg)
    pictures = [{"bytes": None, "path": f"{i:02d}.jpg"} for i in range(PICTURES)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(pictures, kind)}), tmp_path / "in" / "all.parquet", row_group_size=5)

    def part(number):
        source = ParquetSource([tmp_path / "in" / "all.parquet"])
        convert_part(source, tmp_path / "out", ConvertSettings(), number, 2, workers=1)

    part(1)
    for i, jpeg in enumerate(jpegs[1]):
        write(tmp_path / "in" / f"{i:02d}.jpg", jpeg)
    with refused(r"[0-9]{2}\.jpg"):
        part(2)


def test_going_on_after_a_picture_changed_is_one_line_that_does_not_advise_to_go_on(tmp_path, jpegs):
    sources = Sources("folder", tmp_path / "in", jpegs)
    sources.part(tmp_path / "out", 1)
    sources.change("pictures/07.jpg")
    command = ["convert", "folder", tmp_path / "in" / "pictures", tmp_path / "out", "--resume", "--workers", "1"]
    result = cli(*command)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, (
        f"Error: {tmp_path}/in/pictures/07.jpg was changed after the conversion began; start it over without --resume: "
        f"remove {tmp_path}/.out.partial and convert again"
    ))  # fmt: skip
    assert "continue" not in result.stderr
    shutil.rmtree(tmp_path / ".out.partial")
    assert sources.whole(tmp_path / "out").index.n == PICTURES


@pytest.mark.parametrize("kind", OPEN)
def test_copied_and_touched_files_give_the_same_bytes_and_nothing_is_made_again(kind, tmp_path, jpegs):
    sources = Sources(kind, tmp_path / "in", jpegs)
    sources.whole(tmp_path / "a" / "out")
    (tmp_path / "in").rename(tmp_path / "before")
    shutil.copytree(tmp_path / "before", tmp_path / "in", copy_function=shutil.copyfile)
    assert sources.whole(tmp_path / "a" / "out", resume=True).seen == 0
    sources.whole(tmp_path / "b" / "out")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


@pytest.mark.parametrize("kind", OPEN)
def test_appending_samples_that_were_touched_since_is_refused_as_before(kind, tmp_path, jpegs):
    sources = Sources(kind, tmp_path / "in", jpegs)
    sources.whole(tmp_path / "out")
    files = [path for path in (tmp_path / "in").rglob("*") if path.is_file()]
    for path in files:
        path.write_bytes(path.read_bytes())
    given = {"folder": ["in/pictures"], "csv": ["in/list.csv"]}.get(kind, ["in"])
    result = cli("convert", kind, *(str(tmp_path / name) for name in given), tmp_path / "out", "--append")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"Error: {tmp_path}/out holds these samples already")


def test_a_list_that_was_only_touched_has_not_changed(tmp_path, jpegs):
    sources = Sources("csv", tmp_path / "in", jpegs)
    sources.part(tmp_path / "out", 1)
    (tmp_path / "in" / "list.csv").write_bytes((tmp_path / "in" / "list.csv").read_bytes())
    sources.part(tmp_path / "out", 2)
    assert sources.finish(tmp_path / "out").index.n == PICTURES


def test_a_shard_of_a_conversion_that_was_started_over_is_not_done(tmp_path, jpegs):
    sources = Sources("webdataset", tmp_path / "in", jpegs)
    sources.part(tmp_path / "out", 1)
    (tmp_path / ".out.partial").rename(tmp_path / "before")
    sources.change("0.tar")
    assert sources.part(tmp_path / "out", 2).shards_done == 2
    for files in ("parts", "dataset/shards"):  # as by a task that outlived it
        shutil.copytree(tmp_path / "before" / files, tmp_path / ".out.partial" / files, dirs_exist_ok=True)
    assert sources.part(tmp_path / "out", 1).seen == 30
