"""Write one shard, from samples to verified files on disk; runs in the worker processes."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ...storage.files import sha256_of, sync
from ..dataset_index import SHARD_SUFFIXES
from ..errors import BadSampleError, DatasetError, SourceError
from ..ffcv_table import FFCVTable
from ..raw_bytes import Descriptor, writable
from ..row_records import MAX_BYTES, RECORD, Extent, RowRecords, write_row_records
from ..sources import Sample, Source
from ..stored_sample import SOUND, Located, checksum, read_samples
from ..tokenizer import encode, vocab_size_of
from .bad_samples import BadSample
from .beton import BetonRow, write_beton
from .bucket_partial import ShardObjects
from .images import to_stored
from .marker import PART_SUFFIXES, ShardResult
from .partial import ShardFiles
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
AnyShardFiles = ShardFiles | ShardObjects
ENCODED_AT_ONCE = 32
SECONDS_BETWEEN_FLUSHES = 0.2


class Conversion(NamedTuple):
    """Data shared by a conversion's shards."""

    source: Source
    settings: ConvertSettings
    tokenizer: Tokenizer | None
    count_one: Callable[[bool], None]
    """Called after every sample, with True if it was left out; an exception from it ends the shard."""


def write_shard(part: AnyShardFiles, source_indices: NDArray[np.int64], conversion: Conversion) -> ShardResult:
    """Write the usable samples in the given order, the list of the others, and finally the marker; return its content.

    Raises DatasetError if the files read back differ from the written data, and SourceError at the first bad sample if
    settings.on_error is "fail".
    """
    descriptor = part.begin()
    try:
        result = _written(part, descriptor, source_indices, conversion)
        part.publish(result)
    finally:
        os.close(descriptor)
    return result


def _written(
    part: AnyShardFiles, descriptor: int, source_indices: NDArray[np.int64], conversion: Conversion
) -> ShardResult:
    """Write the shard's files and flush them to disk. descriptor: the open .beton."""
    beton, row_records, parquet, errors = (part.being_written(suffix) for suffix in PART_SUFFIXES)
    length = conversion.settings.context_length if conversion.tokenizer else None
    with _flushed_meanwhile(descriptor):
        with errors.open("x", encoding="utf-8") as left_out:
            rows = _Rows(source_indices, conversion, left_out)
            write_beton(beton, rows, max_rows=len(source_indices), context_length=length)
        table = pa.table(rows.table, schema=rows.schema)
        pq.write_table(table, parquet)
        _write_and_verify(beton, row_records, rows, conversion)
        if pq.read_table(parquet) != table:
            raise _not_what_was_written(parquet)
        files = {suffix: part.being_written(suffix) for suffix in SHARD_SUFFIXES}
        digests: dict[str, str] = {suffix: sha256_of(file) for suffix, file in files.items()}
    for file in (row_records, parquet, errors):
        sync(file)
    counts = rows.captions_per_row
    return ShardResult(
        len(table),
        digests,
        rows.left_out,
        rows.truncated,
        rows.blank,
        sum(counts),
        max(counts, default=0),
        sizes={suffix: part.being_written(suffix).stat().st_size for suffix in PART_SUFFIXES},
        plan=part.plan,
        etags={},
    )


class _Rows:
    """Iterates once over a shard's usable samples as rows, and collects their tables and checksums on the way."""

    def __init__(self, source_indices: NDArray[np.int64], conversion: Conversion, errors: TextIO) -> None:
        self._source_indices, self._errors = source_indices, errors
        self._source, self._settings, self._tokenizer, self._count_one = conversion
        alters = self._source.alters
        self.schema = TABLE_SCHEMA.append(pa.field("altered", pa.string())) if alters else TABLE_SCHEMA
        self.table: dict[str, list[Any]] = {name: [] for name in self.schema.names}
        self.source_index: list[int] = []
        self.jpeg_checksums: list[int] = []
        self.tokens_checksums: list[int] = []
        self.captions_per_row: list[int] = []
        self.left_out = self.truncated = self.blank = 0

    def __iter__(self) -> Iterator[BetonRow]:
        usable = self._usable()
        while some := list(islice(usable, ENCODED_AT_ONCE)):
            if self._tokenizer is not None:
                captions = [sample.captions or ("",) for sample, _ in some]
                tokens, truncated = encode(self._tokenizer, [text for texts in captions for text in texts])
                self.truncated += truncated
                of_rows = np.split(tokens, np.cumsum([len(texts) for texts in captions])[:-1])
                some = [(sample, row._replace(tokens=own)) for (sample, row), own in zip(some, of_rows, strict=True)]
            for sample, row in some:
                self._note(sample, row)
                yield row

    def _usable(self) -> Iterator[tuple[Sample, BetonRow]]:
        for source_index in self._source_indices.tolist():
            try:
                sample = self._source[source_index]
                jpeg, height, width, is_blank = to_stored(sample.picture, self._settings.image)
                self._refuse_too_many_tokens(sample, jpeg)
            except BadSampleError as error:
                self._leave_out(source_index, str(error))
                continue
            self.blank += is_blank
            self._count_one(False)
            yield sample._replace(picture=b""), BetonRow(jpeg, height, width, None, source_index)

    def _refuse_too_many_tokens(self, sample: Sample, jpeg: bytes) -> None:
        count, length = len(sample.captions), self._settings.context_length
        if len(jpeg) + 4 * count * length > MAX_BYTES:
            raise BadSampleError(
                f"its JPEG of {len(jpeg):,} bytes and {count} captions of {length:,} tokens do not "
                f"fit {MAX_BYTES:,} bytes; lower --context-length or --max-size"
            )

    def _leave_out(self, source_index: int, reason: str) -> None:
        uri, key = self._source.uri(source_index), self._source.key(source_index)
        if self._settings.on_error == "fail":
            raise SourceError(f"{uri!r}: {reason}. Fix it, or leave such samples out with --on-error skip")
        self._errors.write(BadSample(uri, key, reason).line())
        self._errors.flush()
        self.left_out += 1
        self._count_one(True)

    def _note(self, sample: Sample, row: BetonRow) -> None:
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


def _write_and_verify(beton: Path, row_records: Path, rows: _Rows, conversion: Conversion) -> None:
    """Write the row records and read every row back by them: FFCV does not notice a full disk.

    Raises DatasetError if the files do not hold the rows.
    """
    file, tokenizer, count = Descriptor(beton), conversion.tokenizer, len(rows.source_index)
    length = conversion.settings.context_length if tokenizer else 0
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
    write_row_records(row_records, records, file.bytes)
    if RowRecords(row_records, count, extent).read(np.arange(count), read) < count:
        raise _not_what_was_written(row_records)
    vocab_size = vocab_size_of(tokenizer) if tokenizer else 0
    located = Located.of(read, file=file.number, vocab_size=vocab_size, context_length=length)
    _, fault = read_samples(located, 0, count, located.jpeg_bytes, np.empty(MAX_BYTES, np.uint8))
    if fault != SOUND:
        raise _not_what_was_written(beton)


def _not_what_was_written(file: Path) -> DatasetError:
    return DatasetError(
        f"{file} does not hold what was written to it; the disk may be full or failing. Use --resume to write it again"
    )
