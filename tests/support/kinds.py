"""The same pictures as each kind of source has them: in a folder, a list, tars and tables, on a disk or in a bucket."""

import io
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.pipeline.sources.webdataset import WebDatasetSource

from support.tars import packed

PICTURES = 60


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
        own = range(number, PICTURES, 2)
        pairs = [((f"{i:02d}.jpg", jpegs[i]), (f"{i:02d}.txt", f"the {word} of {i:02d}".encode())) for i in own]
        files[f"{number}.tar"] = packed(*chain.from_iterable(pairs))
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
