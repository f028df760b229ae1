"""The table of a dataset's samples: what is known of each, for people and for reports."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...storage.arrays import Int64s
from ...storage.files import open_regular
from ...storage.place import Place
from ..errors import CURE, DatasetError
from .files import DatasetFiles
from .index import INDEX_FILE, SHARD_FOLDER, DatasetIndex

PLACE_IN_SHARD = "row"
"""Column of the row number in the shard."""
CAPTION, CAPTIONS = "caption", "captions"
"""A sample's first caption or null, and the stored list of all captions, which is read only when it is requested."""


class SamplesTable:
    """Human-readable facts about each sample: one Parquet file per shard, possibly untrusted.

    A file's digest is checked when it is first opened. Methods raise DatasetError for an id out of range, a missing
    column or row, or a damaged file.
    """

    def __init__(self, place: Place, index: DatasetIndex, files: DatasetFiles) -> None:
        self.place = place
        """Folder or address of the dataset."""
        self.index, self.files = index, files
        self.first_id = np.array(index.first_id, np.int64)
        self._verified: set[int] = set()

    @property
    def n(self) -> int:
        """Number of samples."""
        return self.index.n

    def __len__(self) -> int:
        return self.n

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.first_id) - 1

    def locate(self, sample_ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return shard and row of each id, both int64 [b]."""
        if len(sample_ids) and (sample_ids.min() < 0 or sample_ids.max() >= self.n):
            known = f"{self.place} holds 0 to {self.n - 1}"
            raise DatasetError(f"sample ids {sample_ids.min()} to {sample_ids.max()} are out of range: {known}")
        shard = np.searchsorted(self.first_id, sample_ids, side="right") - 1
        return shard, sample_ids - self.first_id[shard]

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the columns, from the first shard."""
        with self._open(0) as parquet:
            return _seen(parquet.schema_arrow)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one column for all n samples, ordered by id."""
        shards = [self.table_of(shard, [name])[name] for shard in range(self.shards)]
        return pa.chunked_array([chunk for shard in shards for chunk in shard.chunks])

    def tables(self, names: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Yield columns, ordered by id, in tables of `rows` rows; the last may be shorter."""
        pending, held = [], 0
        for shard in range(self.shards):
            for batch in self._batches(shard, names, rows):
                pending.append(batch)
                held += len(batch)
                while held >= rows:
                    table = pa.Table.from_batches(pending)
                    yield table.slice(0, rows)
                    pending, held = table.slice(rows).to_batches(), held - rows
        if held:
            yield pa.Table.from_batches(pending)

    def _batches(self, shard: int, names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield columns of a shard in batches of `rows` rows or fewer."""
        with self._open(shard, names) as parquet:
            for batch in parquet.iter_batches(batch_size=rows, columns=_stored(parquet.schema_arrow, names)):
                batch.validate(full=True)  # above all check that text is UTF-8
                yield _with_first_captions(batch).select(list(names))

    def take(self, sample_ids: Int64s, names: Sequence[str]) -> pa.Table:
        """Return columns for ids, int64 [b], in the given order; reads only their shards."""
        shards, rows = self.locate(sample_ids)
        by_shard = np.argsort(shards, kind="stable")
        first_of_shard = np.flatnonzero(np.diff(shards[by_shard], prepend=-1))
        of_shards = np.split(by_shard, first_of_shard)[1:]
        pieces = [self.table_of(int(shards[places[0]]), names).take(rows[places]) for places in of_shards]
        table = pa.concat_tables(pieces) if pieces else self.schema.empty_table().select(list(names))
        in_order = bool((np.diff(shards) >= 0).all())  # saves copying the texts again
        return table if in_order else table.take(np.argsort(by_shard, kind="stable"))

    def rows(self, sample_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of a few ids, in the given order, each with its `sample_id`."""
        table = self.take(np.array(sample_ids, np.int64), self.schema.names)
        return [{"sample_id": int(id), **row} for id, row in zip(sample_ids, table.to_pylist(), strict=True)]

    def table_of(self, shard: int, names: Sequence[str]) -> pa.Table:
        """Return columns of all rows of a shard."""
        return pa.Table.from_batches([*self._batches(shard, names, self.n)])

    @contextmanager
    def _open(self, shard: int, names: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
        """Open a shard's part of the table and check that it has these columns and every row."""
        name = f"{SHARD_FOLDER}/{self.index.shard_name(shard, 'parquet')}"
        path = self.place / name
        rows = self.index.first_id[shard + 1] - self.index.first_id[shard]
        try:
            with open_regular(self.files.whole(name)) as file:
                digest = self.index.shard_digests[shard].get("parquet")
                if digest and shard not in self._verified:
                    if hashlib.file_digest(cast(Any, file), "sha256").hexdigest() != digest:
                        raise DatasetError(
                            f"{path} was changed after conversion: its sha256 differs from that in {INDEX_FILE}. {CURE}"
                        )
                    self._verified.add(shard)
                with pq.ParquetFile(file) as parquet:
                    known = _seen(parquet.schema_arrow).names
                    if missing := [name for name in names if name not in (*known, *parquet.schema_arrow.names)]:
                        lacks = ", ".join(map(repr, missing))
                        raise DatasetError(f"{path} has no column {lacks}; it has {', '.join(known)}")
                    if parquet.metadata.num_rows != rows:
                        raise DatasetError(
                            f"{path} holds {parquet.metadata.num_rows:,} rows, but {INDEX_FILE} says {rows:,}. {CURE}"
                        )
                    yield parquet
        except (pa.ArrowException, UnicodeError) as error:
            reason = " ".join(str(error).split())
            raise DatasetError(f"{path} cannot be read: {reason}. {CURE}") from error


def _seen(schema: pa.Schema) -> pa.Schema:
    """Return the schema that readers see unless they name CAPTIONS."""
    place = schema.get_field_index(CAPTIONS)
    return schema if place < 0 else schema.set(place, pa.field(CAPTION, pa.string()))


def _stored(schema: pa.Schema, names: Sequence[str]) -> list[str]:
    """Return the stored columns behind the requested ones."""
    has_list = CAPTIONS in schema.names
    return [*dict.fromkeys(CAPTIONS if name == CAPTION and has_list else name for name in names)]


def _with_first_captions(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add the first entry, or null, of the list of captions, if there is one."""
    place = batch.schema.get_field_index(CAPTIONS)
    if place < 0:
        return batch
    lists = batch.column(place)
    if not pa.types.is_list(lists.type) or not pa.types.is_string(lists.type.value_type):
        raise pa.ArrowInvalid(f"{CAPTIONS} has type {lists.type}, not lists of strings")
    starts = pc.if_else(pc.greater(pc.list_value_length(lists), 0), lists.offsets[:-1], pa.scalar(None, pa.int32()))
    return batch.append_column(CAPTION, lists.values.take(starts))
