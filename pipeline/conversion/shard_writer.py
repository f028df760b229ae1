"""Write one part, from samples to verified files on disk; runs in the worker processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ...storage.files import sha256_of, sync
from ..dataset.ffcv_table import FFCVTable
from ..dataset.index import SHARD_SUFFIXES
from ..dataset.raw_bytes import Descriptor, writable
from ..dataset.row_records import IN_BETON, PAGE_BYTES, RECORD, Extent, RowRecords, picture_places, write_row_records
from ..dataset.stored_sample import SOUND, Located, checksum, read_samples, read_tokens
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
ENCODED_AT_ONCE = 32
SECONDS_BETWEEN_FLUSHES = 0.2


class Writer(NamedTuple):
    """What a process needs to write parts."""

    source: Source
    settings: ConvertSettings
    tokenizer: Tokenizer | None
    count_more: Callable[[Counts], None]
    """Called after every sample; an exception from it ends the part."""

    @property
    def tar_bytes(self) -> NDArray[np.int64] | None:
        """Sizes of the tars, int64 [tars], that are to keep their pictures."""
        index = self.source.index
        return None if index is None else np.array([tar.size for tar in index.files], np.int64)


def write_part(part: PartFiles, work: Any, writer: Writer) -> PartResult:
    """Write the usable samples, the list of the others, and finally the marker; return its content.

    Raises DatasetError if the files read back differ from the written data, and SourceError at the first bad sample if
    settings.on_error is "fail".
    """
    with ExitStack() as open_files:
        result = _written(part, work, writer, open_files)
        part.publish(result)
    return result


def _written(part: PartFiles, work: Any, writer: Writer, open_files: ExitStack) -> PartResult:
    """Write the part's shards one after the other. open_files: keeps each .beton open, which shows that it is written.

    A group of tars can have more samples than a shard.
    """
    shards, errors = list[ShardResult](), part.being_written("errors.jsonl")
    descriptor = _begun(part, 0, open_files)
    with errors.open("x", encoding="utf-8") as left_out:
        samples = _Samples(writer, work, left_out)
        while not shards or samples.next() is not None:
            if shards:
                descriptor = _begun(part, len(shards), open_files)
            shards.append(_shard(part, len(shards), descriptor, samples, writer))
    sync(errors)
    if not shards[0].rows:
        for suffix in SHARD_SUFFIXES:
            part.being_written(suffix).unlink()
        shards.clear()
    return PartResult(tuple(shards), samples.found, errors.stat().st_size, part.plan, unused=dict(samples.unused))


def _begun(part: PartFiles, shard: int, open_files: ExitStack) -> int:
    descriptor = part.begin(shard)
    open_files.callback(os.close, descriptor)
    return descriptor


def _shard(part: PartFiles, shard: int, descriptor: int, samples: _Samples, writer: Writer) -> ShardResult:
    """Write a shard's files and flush them to disk. descriptor: the open .beton."""
    files = {suffix: part.being_written(suffix, shard) for suffix in SHARD_SUFFIXES}
    length = writer.settings.context_length if writer.tokenizer else None
    with _flushed_meanwhile(descriptor):
        rows = _Rows(samples, writer)
        write_beton(files["beton"], rows, max_rows=samples.max_rows, context_length=length)
        table = pa.table(rows.table, schema=rows.schema)
        pq.write_table(table, files["parquet"])
        _write_and_verify(files["beton"], files["rows"], rows, writer)
        if pq.read_table(files["parquet"]) != table:
            raise _not_what_was_written(files["parquet"])
        digests: dict[str, str] = {suffix: sha256_of(file) for suffix, file in files.items()}
    sync(files["rows"])
    sync(files["parquet"])
    counts = rows.captions_per_row
    sizes: dict[str, int] = {suffix: file.stat().st_size for suffix, file in files.items()}
    return ShardResult(len(table), digests, sizes, sum(counts), max(counts, default=0), etags={})


class _Samples:
    """Iterates once over a part's usable samples in their stored form, and counts the others."""

    def __init__(self, writer: Writer, work: Any, errors: TextIO) -> None:
        self._settings, self._count, self._errors = writer.settings, writer.count_more, errors
        self.max_rows: int = work.max_rows
        self.found = SampleCounts()
        self.unused = Account()
        self._usable = self._usable_of(writer.source.read(work))
        self._next: tuple[Sample, BetonRow] | None = None

    def add(self, counts: SampleCounts) -> None:
        self.found = SampleCounts.sum_of([self.found, counts])

    def next(self) -> tuple[Sample, BetonRow] | None:
        """Return the sample that `take` will take; None at the end."""
        if self._next is None:
            self._next = next(self._usable, None)
        return self._next

    def take(self, most: int) -> list[tuple[Sample, BetonRow]]:
        """Take the next samples."""
        taken = list[tuple[Sample, BetonRow]]()
        while len(taken) < most and (found := self.next()) is not None:
            taken.append(found)
            self._next = None
        return taken

    def _usable_of(self, reads: Iterator[Read]) -> Iterator[tuple[Sample, BetonRow]]:
        for source_index, sample, done, files, ignored, unused in reads:
            for each in unused:
                self.unused.add(*each)
            if isinstance(sample, Sample):
                try:
                    jpeg, height, width, is_blank, tone = to_stored(sample.picture, self._settings.image)
                    self._refuse_too_many_tokens(sample, jpeg)
                except BadSampleError as error:
                    sample = BadSample(sample.uri, sample.key, str(error))
            if isinstance(sample, BadSample):
                self._leave_out(sample)  # before it is counted: whoever stops at a count finds the reasons written
            self._count(Counts(done, int(sample is not None), int(isinstance(sample, BadSample)), files))
            if isinstance(sample, Sample):
                tar_at = sample.tar_at if jpeg is sample.picture else None
                self.add(SampleCounts(0, 0, is_blank, ignored, tar_at is not None, tone < 0, tone > 0))
                yield sample._replace(picture=b""), BetonRow(jpeg, height, width, None, source_index, tar_at)

    def _refuse_too_many_tokens(self, sample: Sample, jpeg: bytes) -> None:
        count, length = len(sample.captions), self._settings.context_length
        if len(jpeg) + 4 * count * length > PAGE_BYTES:
            raise BadSampleError(
                f"its JPEG of {len(jpeg):,} bytes and {count} captions of {length:,} tokens do not "
                f"fit {PAGE_BYTES:,} bytes; lower --context-length or --max-size"
            )

    def _leave_out(self, sample: BadSample) -> None:
        if self._settings.on_error == "fail":
            raise SourceError(
                f"{sample.uri!r}: {sample.reason}. Fix it, or leave such samples out with --on-error skip"
            )
        self._errors.write(line_of(sample))
        self._errors.flush()
        self.add(SampleCounts(left_out=1))


class _Rows:
    """Iterates once over a shard's samples as rows, and collects their tables and checksums on the way."""

    def __init__(self, samples: _Samples, writer: Writer) -> None:
        self._samples, self._tokenizer = samples, writer.tokenizer
        alters = writer.source.alters
        self.schema = TABLE_SCHEMA.append(pa.field("altered", pa.string())) if alters else TABLE_SCHEMA
        self.table: dict[str, list[Any]] = {name: [] for name in self.schema.names}
        self.source_index: list[int] = []
        self.jpeg_checksums: list[int] = []
        self.tokens_checksums: list[int] = []
        self.captions_per_row: list[int] = []
        self.in_tars: list[tuple[int, int, int]] = []
        """Row, offset in the tar and bytes of the pictures that stay there."""

    def __iter__(self) -> Iterator[BetonRow]:
        while some := self._samples.take(min(ENCODED_AT_ONCE, self._samples.max_rows - len(self.source_index))):
            if self._tokenizer is not None:
                captions = [sample.captions or ("",) for sample, _ in some]
                tokens, truncated = encode(self._tokenizer, [text for texts in captions for text in texts])
                self._samples.add(SampleCounts(truncated=truncated))
                of_rows = np.split(tokens, np.cumsum([len(texts) for texts in captions])[:-1])
                some = [(sample, row._replace(tokens=own)) for (sample, row), own in zip(some, of_rows, strict=True)]
            for sample, row in some:
                self._note(sample, row)
                yield row

    def _note(self, sample: Sample, row: BetonRow) -> None:
        if row.tar_at is not None:
            self.in_tars.append((len(self.source_index), row.tar_at, len(row.jpeg)))
        record = (
            len(self.source_index),
            sample.key,
            sample.uri,
            list(sample.captions),
            sample.group,
            row.width,
            row.height,
            sample.altered,
        )
        for column, value in zip(self.table.values(), record, strict=False):  # `altered` may have no column
            column.append(value)
        self.source_index.append(row.source_index)
        self.jpeg_checksums.append(int(checksum(writable(row.jpeg))))
        self.tokens_checksums.append(0 if row.tokens is None else int(checksum(row.tokens.reshape(-1).view(np.uint8))))
        self.captions_per_row.append(0 if row.tokens is None else len(row.tokens))


@contextmanager
def _flushed_meanwhile(descriptor: int) -> Iterator[None]:
    """Sync the block's writes to an open file, continuously, since the disk is otherwise idle, and at the end.

    The file must be open before any write: a descriptor misses earlier write-back errors.
    """
    ended = threading.Event()

    def flush() -> None:
        while not ended.wait(SECONDS_BETWEEN_FLUSHES):
            os.fdatasync(descriptor)

    with ThreadPoolExecutor(1) as thread:
        flushing = thread.submit(flush)
        try:
            yield
        finally:
            ended.set()
    flushing.result()
    os.fsync(descriptor)


def _write_and_verify(beton: Path, row_records: Path, rows: _Rows, writer: Writer) -> None:
    """Write the row records and read every row back by them: FFCV does not notice a full disk.

    Raises DatasetError if the files do not hold the rows.
    """
    file, tokenizer, count = Descriptor(beton), writer.tokenizer, len(rows.source_index)
    length = writer.settings.context_length if tokenizer else 0
    extent = Extent(file.bytes, 4 * length, max(rows.captions_per_row, default=0))
    records, read = np.empty(count, RECORD), np.empty(count, RECORD)
    try:
        of_first = extent._replace(captions=min(extent.captions, 1))
        with_more = sum(captions > 1 for captions in rows.captions_per_row)
        FFCVTable(beton, file, count, of_first, with_more).read(np.arange(count), records)
    except DatasetError as error:
        raise _not_what_was_written(beton) from error
    noted = {"source_index": rows.source_index, "width": rows.table["width"], "height": rows.table["height"]}
    if not all(np.array_equal(records[name], values) for name, values in noted.items()):
        raise _not_what_was_written(beton)
    records["captions"] = rows.captions_per_row
    records["jpeg_checksum"], records["tokens_checksum"] = rows.jpeg_checksums, rows.tokens_checksums
    if (tar_bytes := writer.tar_bytes) is not None:
        extent = extent._replace(tar_bytes=tar_bytes)
        records["jpeg_at"] |= IN_BETON
        for row, at, size in rows.in_tars:
            records["jpeg_at"][row], records["jpeg_bytes"][row] = at, size
    write_row_records(row_records, records, file.bytes)
    if RowRecords(row_records, count, extent).read(np.arange(count), read) < count:
        raise _not_what_was_written(row_records)
    vocab_size = vocab_size_of(tokenizer) if tokenizer else 0
    tars, read["jpeg_at"] = picture_places(read, tar_bytes is not None)
    located_of = partial(Located.of, file=file.number, vocab_size=vocab_size, context_length=length)
    located = located_of(read[tars < 0])
    _, fault = read_samples(located, 0, len(located.files), located.jpeg_bytes, np.empty(PAGE_BYTES, np.uint8))
    if fault == SOUND and tar_bytes is not None:
        _, fault = read_tokens(located_of(read))
    if fault != SOUND:
        raise _not_what_was_written(beton)


def _not_what_was_written(file: Path) -> DatasetError:
    return DatasetError(
        f"{file} does not hold what was written to it; the disk may be full or failing. Use --resume to write it again"
    )
