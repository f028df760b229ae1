"""Write one part, from samples to verified files on disk; runs in the worker processes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from ...storage.arrays import Records
from ...storage.files import RegularFile, sha256_of, sync
from ..dataset.index import SHARD_SUFFIXES
from ..dataset.row_records import NO_TARS, PAGE_BYTES, RECORD, Extent, RowRecords, picture_places, write_row_records
from ..dataset.stored_sample import SOUND, Located, read_samples, read_tokens
from ..dataset.tokenizer import encode, vocab_size_of
from ..errors import BadSampleError, DatasetError, SourceError
from ..sources import Account, BadSample, Read, Sample, Source
from .beton import BetonRow, write_beton
from .images import to_stored
from .marker import Counts, PartResult, SampleCounts, ShardResult, line_of
from .partial import PartFiles
from .plan import ConvertSettings

TABLE_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("key", pa.string()),
        ("uri", pa.string()),
        ("captions", pa.list_(pa.string())),
        ("group", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
    ]
)
"""Columns of the samples table; `altered`, a string, comes last if the source alters samples."""


class Writer(NamedTuple):
    """What a process needs to write parts."""

    source: Source
    settings: ConvertSettings
    tokenizer: Tokenizer | None
    count_more: Callable[[Counts], None]
    """Called after every sample; an exception from it ends the part."""


def write_part(part: PartFiles, work: Any, writer: Writer) -> PartResult:
    """Write the usable samples, the list of the others, and finally the marker; return its content.

    A group of tars can have more samples than a shard. Raises DatasetError if the files read back differ from the
    written data, and SourceError at the first bad sample if settings.on_error is "fail".
    """
    shards, errors = list[ShardResult](), part.being_written("errors.jsonl")
    errors.unlink(missing_ok=True)  # left by an earlier attempt of this process
    with errors.open("x", encoding="utf-8") as left_out:
        samples = _Samples(writer, work, left_out)
        while (first := next(samples.usable, None)) is not None:
            some = chain([first], islice(samples.usable, work.max_rows - 1))
            shards.append(_shard(part, len(shards), _Rows(some, samples, writer), work.max_rows, writer))
    sync(errors)
    found = SampleCounts(**samples.found)
    result = PartResult(tuple(shards), found, errors.stat().st_size, part.plan, unused=dict(samples.unused))
    part.publish(result)
    return result


def _shard(part: PartFiles, shard: int, rows: _Rows, max_rows: int, writer: Writer) -> ShardResult:
    files = {suffix: part.being_written(suffix, shard) for suffix in SHARD_SUFFIXES}
    for file in files.values():
        file.unlink(missing_ok=True)  # left by an earlier attempt of this process
    length, in_place = writer.settings.context_length if writer.tokenizer else None, writer.source.index is not None
    with _flushed_meanwhile(files["beton"]):
        records = write_beton(files["beton"], rows, max_rows=max_rows, context_length=length, in_place=in_place)
        table = pa.table(rows.table, schema=rows.schema)
        pq.write_table(table, files["parquet"])
        _write_and_verify(files["beton"], files["rows"], records, writer)
        if pq.read_table(files["parquet"]) != table:
            raise _not_what_was_written(files["parquet"])
        digests: dict[str, str] = {suffix: sha256_of(file) for suffix, file in files.items()}
    sync(files["rows"])
    sync(files["parquet"])
    captions = records["captions"]
    sizes: dict[str, int] = {suffix: file.stat().st_size for suffix, file in files.items()}
    return ShardResult(len(table), digests, sizes, int(captions.sum()), int(captions.max()), etags={})


class _Samples:
    """A part's usable samples in their stored form, once and in order; counts and lists the others."""

    def __init__(self, writer: Writer, work: Any, errors: TextIO) -> None:
        self._settings, self._count, self._errors = writer.settings, writer.count_more, errors
        self.found: Counter[str] = Counter()
        """The numbers of SampleCounts."""
        self.unused = Account()
        self.usable = self._usable_of(writer.source.read(work))

    def _usable_of(self, reads: Iterator[Read]) -> Iterator[tuple[Sample, BetonRow]]:
        for source_index, sample, done, files, ignored, unused in reads:
            for each in unused:
                self.unused.add(*each)
            if isinstance(sample, Sample):
                try:
                    jpeg, height, width, is_blank, tone = to_stored(sample.picture, self._settings.image)
                    count, length = len(sample.captions), self._settings.context_length
                    if len(jpeg) + 4 * count * length > PAGE_BYTES:
                        parts = f"its JPEG of {len(jpeg):,} bytes and {count} captions of {length:,} tokens"
                        cure = "lower --context-length or --max-size"
                        raise BadSampleError(f"{parts} do not fit {PAGE_BYTES:,} bytes; {cure}")
                except BadSampleError as error:
                    sample = BadSample(sample.uri, sample.key, str(error))
            if isinstance(sample, BadSample):
                if self._settings.on_error == "fail":
                    cure = "Fix it, or leave such samples out with --on-error skip"
                    raise SourceError(f"{sample.uri!r}: {sample.reason}. {cure}")
                self._errors.write(line_of(sample))
                self._errors.flush()  # before it is counted: whoever stops at a count finds the reasons written
                self.found["left_out"] += 1
            self._count(Counts(done, int(sample is not None), int(isinstance(sample, BadSample)), files))
            if isinstance(sample, Sample):
                tar_at = sample.tar_at if jpeg is sample.picture else None
                self.found += Counter(
                    blank=is_blank,
                    ignored=ignored,
                    in_tars=tar_at is not None,
                    nearly_black=tone < 0,
                    nearly_white=tone > 0,
                    without_class=sample.group is None,
                )
                yield sample._replace(picture=b""), BetonRow(jpeg, height, width, None, source_index, tar_at)


class _Rows:
    """Iterates once over a shard's samples as rows, and collects their table on the way."""

    def __init__(self, some: Iterator[tuple[Sample, BetonRow]], samples: _Samples, writer: Writer) -> None:
        self._some, self._samples, self._tokenizer = some, samples, writer.tokenizer
        alters = writer.source.alters
        self.schema = TABLE_SCHEMA.append(pa.field("altered", pa.string())) if alters else TABLE_SCHEMA
        self.table: dict[str, list[Any]] = {name: [] for name in self.schema.names}

    def __iter__(self) -> Iterator[BetonRow]:
        while some := [*islice(self._some, 32)]:  # encoded at once
            of_rows: list[Any] = [None] * len(some)
            if self._tokenizer is not None:
                captions = [sample.captions or ("",) for sample, _ in some]
                tokens, truncated = encode(self._tokenizer, [text for texts in captions for text in texts])
                self._samples.found["truncated"] += truncated
                of_rows = np.split(tokens, np.cumsum([len(texts) for texts in captions])[:-1])
            for (sample, row), own in zip(some, of_rows, strict=True):
                of_sample = (sample.key, sample.uri, list(sample.captions), sample.group)
                record = (len(self.table["row"]), *of_sample, row.width, row.height, sample.altered)
                for column, value in zip(self.table.values(), record, strict=False):  # `altered` may have no column
                    column.append(value)
                yield row._replace(tokens=own)


@contextmanager
def _flushed_meanwhile(file: Path) -> Iterator[None]:
    """Create a file; sync the block's writes to it, continuously, since the disk is otherwise idle, and at the end.

    It is opened before any write: a descriptor misses earlier write-back errors.
    """
    ended = threading.Event()

    def flush() -> None:
        while not ended.wait(0.2):
            os.fdatasync(opened)

    with file.open("xb") as created, ThreadPoolExecutor(1) as thread:
        opened = created.fileno()
        flushing = thread.submit(flush)
        try:
            yield
        finally:
            ended.set()
        flushing.result()
        os.fsync(opened)


def _write_and_verify(beton: Path, row_records: Path, records: Records, writer: Writer) -> None:
    """Write the row records and read every row back by them: a failing disk may keep other bytes unnoticed.

    Raises DatasetError if the files do not hold the rows.
    """
    file, tokenizer, count, tars_of = RegularFile(beton), writer.tokenizer, len(records), writer.source.index
    length, read = writer.settings.context_length if tokenizer else 0, np.empty(count, RECORD)
    write_row_records(row_records, records, file.size)
    extent = Extent(file.size, 4 * length, int(records["captions"].max()), tars_of.bytes if tars_of else NO_TARS)
    if RowRecords(row_records, count, extent).read(np.arange(count), read) < count:
        raise _not_what_was_written(row_records)
    vocab_size = vocab_size_of(tokenizer) if tokenizer else 0
    tars, read["jpeg_at"] = picture_places(read, tars_of is not None)
    located_of = partial(Located.of, file=file.number, vocab_size=vocab_size, context_length=length)
    located = located_of(read[tars < 0])
    _, fault = read_samples(located, 0, len(located.files), located.jpeg_bytes, np.empty(PAGE_BYTES, np.uint8))
    if fault == SOUND and tars_of is not None:
        _, fault = read_tokens(located_of(read))
    if fault != SOUND:
        raise _not_what_was_written(beton)


def _not_what_was_written(file: Path) -> DatasetError:
    return DatasetError(
        f"{file} does not hold what was written to it; the disk may be full or failing. Use --resume to write it again"
    )
