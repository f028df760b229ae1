"""The row groups of parquet files: the parts in which they can be read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import BadSampleError, SourceError

MAX_BYTES = 2 << 30
"""Of a row group unpacked: a worker holds one whole."""
KEPT_BYTES = 1 << 30
"""The row groups read last are kept up to this, and the very last one in any case: samples are mixed over several."""
_ROWS_AT_ONCE = 32
"""A page of a few bytes can unpack to one picture a million times over: the limit is watched as often as this."""


class RowGroup(NamedTuple):
    file: int
    number: int
    """Of the row groups of its file."""
    first_row: int
    """In its file."""
    rows: int
    picture_bytes: int


def row_groups_of(path: Path, file: int, metadata: pq.FileMetaData, image: str) -> Iterator[RowGroup]:
    """Those of a file that have rows. Raises SourceError where one is larger than MAX_BYTES."""
    first_row = 0
    for number in range(metadata.num_row_groups):
        part = metadata.row_group(number)
        columns = [part.column(i) for i in range(part.num_columns)]
        size = sum(column.total_uncompressed_size for column in columns if _is_of(column.path_in_schema, image))
        if size > MAX_BYTES:
            raise SourceError(
                f"{path}: row group {number} holds {size / 1e9:.1f} GB of pictures, above {MAX_BYTES / 1e9:.1f}; "
                "rewrite the file with smaller ones (row_group_size=1000 in pyarrow)"
            )
        if part.num_rows > 0:
            yield RowGroup(file, number, first_row, part.num_rows, size)
            first_row += part.num_rows


class RowGroups:
    """Reads the row groups of some files, and keeps those read last; each process its own."""

    def __init__(self, files: tuple[Path, ...], parts: list[RowGroup]) -> None:
        self._files = files
        self.parts = parts
        self._kept: OrderedDict[int, pa.Table | str] = OrderedDict()

    def file(self, part: int) -> Path:
        return self._files[self.parts[part].file]

    def table(self, part: int, columns: list[str]) -> pa.Table:
        """A row group. Raises BadSampleError where it cannot be read."""
        if part not in self._kept:
            self._make_room()
            self._kept[part] = self._load(part, columns)
        self._kept.move_to_end(part)
        if isinstance(found := self._kept[part], str):
            raise BadSampleError(found)
        return found

    def batches(self, part: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(self.file(part)) as parquet:
            yield from parquet.iter_batches(
                _ROWS_AT_ONCE, row_groups=[self.parts[part].number], columns=columns, use_threads=False
            )

    def _load(self, part: int, columns: list[str]) -> pa.Table | str:
        """The row group, or why it cannot be read."""
        batches, size = [], 0
        try:
            for batch in self.batches(part, columns):
                batches.append(batch)
                size += batch.nbytes
                if size > MAX_BYTES:
                    return f"its row group unpacks to more than {MAX_BYTES / 1e9:.1f} GB"
            return pa.Table.from_batches(batches)
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError where there is not one batch
            return f"its row group cannot be read: {error}"

    def _make_room(self) -> None:
        """Before the next one is read, so that no more than one is held beside it."""
        sizes = [0 if isinstance(table, str) else table.nbytes for table in self._kept.values()]
        while sum(sizes) > KEPT_BYTES:
            self._kept.popitem(last=False)
            del sizes[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, (self._files, self.parts)


def _is_of(path: str, column: str) -> bool:
    """Whether a leaf belongs to a column: `image.bytes` to `image`."""
    return path == column or path.startswith(f"{column}.")
