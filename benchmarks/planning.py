"""What a conversion does before it writes: it lists the source, plans the shards and trains a tokenizer.

\b
tsv      one list of paths, captions and classes
parquet  files of a million rows with captions, in row groups of a thousand
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thermopile.pipeline.conversion.conversion import Conversion
from thermopile.pipeline.sources import Source
from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.pipeline.sources.shards import listings
from thermopile.storage.local import LocalPath

from .harness import Figure, Measured, Part, proc_bytes, script

WORDS = "a an the red blue old small large photo picture of with and on in front dog cat house tree street person"
AT_ONCE = 100_000
CLASSES = 1_000
STEPS = {"list": "list the source", "classes": "read its classes", "plan": "make the plan",
         "tokenizer": "train the tokenizer", "cut": "cut into shards"}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Rows of a source."""

    source: str
    """tsv or parquet."""
    rows: int = 100_000_000


def captions(count: int) -> list[str]:
    """Captions of twelve words, some of them rare."""
    rng = np.random.default_rng(0)
    common, rare = rng.choice(WORDS.split(), (count, 11)), rng.integers(0, 50_000, count)
    return [f"{' '.join(words)} {number:x}" for words, number in zip(common.tolist(), rare.tolist(), strict=True)]


def write_tsv(folder: Path, rows: int) -> list[Path]:
    """Write a list of `rows` pictures that do not exist."""
    texts = enumerate(captions(AT_ONCE))
    lines = [f"images/@@@@@@/{place:05d}.jpg\t{text}\tclass {place % CLASSES}\n" for place, text in texts]
    block = "".join(lines).encode()
    with (folder / "list.tsv").open("wb") as file:
        file.write(b"filepath\ttitle\tclass\n")
        for number in range(rows // AT_ONCE):
            file.write(block.replace(b"@@@@@@", b"%06d" % number))
    return [folder / "list.tsv"]


def write_parquet(folder: Path, rows: int) -> list[Path]:
    """Write files of up to a million rows, whose pictures are paths."""
    count = min(rows, 1_000_000)
    texts = captions(AT_ONCE) * (count // AT_ONCE)
    pictures = pa.array([{"bytes": None, "path": f"{place:07d}.jpg"} for place in range(count)],
                        pa.struct({"bytes": pa.binary(), "path": pa.string()}))  # fmt: skip
    table = pa.table({"image": pictures, "caption": texts})
    paths = [folder / f"{number:03d}.parquet" for number in range(rows // count)]
    for path in paths:
        pq.write_table(table, path, row_group_size=1000)
    return paths


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Do what a conversion does before it writes, step by step."""
    is_tsv = sizes.source == "tsv"
    files = (write_tsv if is_tsv else write_parquet)(directory, sizes.rows)
    seconds, began, peak, is_done = {}, perf_counter(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.05):
            peak = max(peak, proc_bytes("self/status", "RssAnon"))

    def lap(name: str) -> None:
        nonlocal began
        seconds[name], began = perf_counter() - began, perf_counter()

    watching = threading.Thread(target=watch)
    watching.start()
    source: Source = CsvSource(files[0], group="class") if is_tsv else ParquetSource(files)
    lap("list")
    groups = source.groups()  # which a conversion holds on to
    lap("classes")
    conversion = Conversion(source, LocalPath(directory / "out"))
    shards = conversion.plan.parts
    lap("plan")
    conversion.begin()
    lap("tokenizer")
    assert sum(map(len, listings(len(source), None, source.chunks(), 0, shards))) == sizes.rows
    lap("cut")
    is_done.set()
    watching.join()
    assert groups is None or len(groups.of_sample) == sizes.rows
    size = sum(file.stat().st_size for file in files)
    return Measured(
        f"{sizes.rows:,} rows, {len(files)} {sizes.source} files, {size / 1e9:.1f} GB",
        "",
        [
            *(Figure(f"{name}_seconds", label, "s", seconds[name]) for name, label in STEPS.items()),
            Figure("minutes", "together", "min", sum(seconds.values()) / 60, at_most=15),
            Figure("peak_gb", "peak memory", "GB", peak / 1e9, at_most=2),
        ],
        notes=["Memory without pages of files, such as the list's, of which the system keeps as many as fit."],
    )  # fmt: skip


PARTS = {source: Part(measure, Sizes(source), Sizes(source, AT_ONCE)) for source in ("tsv", "parquet")}

if __name__ == "__main__":
    script(__doc__, PARTS, "pyarrow", "tokenizers")()
