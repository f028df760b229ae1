"""A source that is changed while it is converted: its old and its new samples are never mixed in a dataset."""

import io
import os
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.objects import Address
from thermopile.pipeline.conversion.convert import ConvertSettings, PartNumber, convert, convert_part, finish
from thermopile.pipeline.errors import DatasetExistsError, SourceError
from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.pipeline.sources.webdataset import WebDatasetSource

from conversions import many_shards

PICTURES = 60


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    many_shards(monkeypatch, rows=15)


@pytest.fixture(scope="module")
def jpegs(draw):
    """Two versions of each picture."""

    def jpeg(number):
        file = io.BytesIO()
        draw(number).save(file, "JPEG")
        return file.getvalue()

    return [[jpeg(number + of_version) for number in range(PICTURES)] for of_version in (0, 1000)]


def write(place, data):
    """Write a file in place, or an object."""
    if isinstance(place, Path):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    else:
        place.write(data)


def pictures(jpegs, word):
    return {f"pictures/{i:02d}.jpg": data for i, data in enumerate(jpegs)}


def listed(jpegs, word):
    rows = "".join(f"pictures/{i:02d}.jpg,the {word} of number {i:02d}\n" for i in range(PICTURES))
    return pictures(jpegs, word) | {"list.csv": b"filepath,title\n" + rows.encode()}


def tars(jpegs, word):
    """Two tars, whose members are of the same sizes whatever the word of five letters."""
    files = {}
    for number in range(2):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for i in range(number, PICTURES, 2):
                for name, data in ((f"{i:02d}.jpg", jpegs[i]), (f"{i:02d}.txt", f"the {word} of {i:02d}".encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        files[f"{number}.tar"] = packed.getvalue()
    return files


def tables(jpegs, word):
    """Two tables without statistics, whose footers do not tell of the captions."""
    files = {}
    for number in range(2):
        file, own = io.BytesIO(), range(number, PICTURES, 2)
        captions = [f"the {word} of number {i:02d}" for i in own]
        table = pa.table({"image": [jpegs[i] for i in own], "caption": captions})
        pq.write_table(table, file, row_group_size=5, compression="none", write_statistics=False)
        files[f"{number}.parquet"] = file.getvalue()
    return files


OPEN = {
    "folder": (pictures, lambda root: FolderSource(root / "pictures")),
    "csv": (listed, lambda root: CsvSource(root / "list.csv")),
    "webdataset": (tars, lambda root: WebDatasetSource([root / "0.tar", root / "1.tar"])),
    "parquet": (tables, lambda root: ParquetSource([root / "0.parquet", root / "1.parquet"])),
}
CHANGED = [("folder", "pictures/07.jpg"), ("csv", "pictures/07.jpg"), ("csv", "list.csv"), ("webdataset", "1.tar"),
           ("parquet", "1.parquet")]  # fmt: skip


class Sources:
    """One of the kinds of source, in a folder or below an address."""

    def __init__(self, kind, root, jpegs):
        self._files, self._open = OPEN[kind]
        self.root, self._jpegs = root, jpegs
        for name, data in self._files(jpegs[0], "claws").items():
            write(root / name, data)

    def listed(self):
        return self._open(self.root)

    def change(self, name):
        """Give a file another content that its listing does not tell of."""
        jpegs = self._jpegs[1] if name.endswith(".jpg") else self._jpegs[0]
        write(self.root / name, self._files(jpegs, "tails")[name])

    def part(self, out, number, count=2):
        return convert_part(self.listed(), out, ConvertSettings(), PartNumber(number, count), workers=1)

    def whole(self, out, **options):
        return convert(self.listed(), out, ConvertSettings(), workers=1, **options)

    def finish(self, out):
        return finish(self.listed(), out, ConvertSettings())


@pytest.mark.parametrize(("kind", "changed"), CHANGED)
def test_a_source_that_changed_between_two_parts_is_refused_naming_the_file(kind, changed, tmp_path, jpegs):
    sources = Sources(kind, tmp_path / "in", jpegs)
    sources.part(tmp_path / "out", 1)
    sources.change(changed)
    with pytest.raises((DatasetExistsError, SourceError), match=rf"^[^\n]*{changed.rpartition('/')[2]}[^\n]*changed"):
        sources.part(tmp_path / "out", 2)
    assert os.listdir(tmp_path) == ["in", ".out.partial"] or not (tmp_path / "out").exists()


@pytest.mark.wide
@pytest.mark.parametrize("to_bucket", [False, True])
@pytest.mark.parametrize(("kind", "changed"), CHANGED)
def test_objects_that_changed_between_two_parts_are_refused_naming_one(kind, changed, to_bucket, tmp_path, jpegs, s3):
    root = Address("bucket", f"{kind}-{changed}-{to_bucket}")
    sources, out = Sources(kind, root / "in", jpegs), root / "out" if to_bucket else tmp_path / "out"
    sources.part(out, 1)
    sources.change(changed)
    with pytest.raises((DatasetExistsError, SourceError), match=rf"^[^\n]*{changed.rpartition('/')[2]}[^\n]*changed"):
        sources.part(out, 2)
    assert not (out / "dataset.json").exists()
