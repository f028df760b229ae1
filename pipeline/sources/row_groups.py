"""Read parquet files by row group."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ...storage.place import Place
from ..errors import BadSampleError, SourceError
from .listing import says_nothing_about_the_file
from .source_file import SourceFile, Version

MAX_BYTES = 2 << 30
"""Limit of an unpacked row group, since a worker holds a whole one."""
KEPT_BYTES = 1 << 30
"""Recent row groups are cached up to this size, the last one always: samples are mixed over several groups."""
_ROWS_AT_ONCE = 32
"""Check the limit this often: a page of a few bytes can unpack to one picture a million times."""


class RowGroup(NamedTuple):
    file: int
    number: int
    """Number of the row group within its file."""
    first_row: int
    """Index of its first row within its file."""
    rows: int
    picture_bytes: int


def row_groups_of(path: Place, file: int, metadata: pq.FileMetaData, image: str) -> Iterator[RowGroup]:
    """Yield the row groups of a file that have rows. Raises SourceError if one exceeds MAX_BYTES."""
    first_row = 0
    for number in range(metadata.num_row_groups):
        part = metadata.row_group(number)
        columns = [part.column(i) for i in range(part.num_columns)]
        leaves = [column for column in columns if f"{column.path_in_schema}.".startswith(f"{image}.")]  # image.bytes
        size = sum(leaf.total_uncompressed_size for leaf in leaves)
        if size > MAX_BYTES:
            raise SourceError(
                f"{path}: row group {number} holds {size / 1e9:.1f} GB of pictures, above {MAX_BYTES / 1e9:.1f}; "
                "rewrite the file with smaller ones (row_group_size=1000 in pyarrow)"
            )
        if part.num_rows > 0:
            yield RowGroup(file, number, first_row, part.num_rows, size)
            first_row += part.num_rows


class RowGroups:
    """Reads row groups of several files, each of a fixed version; each process caches the groups it read last."""

    def __init__(self, files: tuple[Place, ...], versions: list[Version], parts: list[RowGroup]) -> None:
        self._files, self.versions = files, versions
        self.parts = parts
        self._kept: OrderedDict[int, pa.Table | str] = OrderedDict()

    def file(self, part: int) -> Place:
        return self._files[self.parts[part].file]

    def table(self, part: int, columns: list[str]) -> pa.Table:
        """Return a row group. Raises BadSampleError if it cannot be read."""
        if part not in self._kept:
            self._make_room()
            self._kept[part] = self._load(part, columns)
        self._kept.move_to_end(part)
        if isinstance(found := self._kept[part], str):
            raise BadSampleError(found)
        return found

    def batches(self, part: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        group = self.parts[part]
        file = SourceFile(self._files[group.file], self.versions[group.file])
        with pq.ParquetFile(file.reader()) as parquet:
            yield from parquet.iter_batches(_ROWS_AT_ONCE, [group.number], columns, use_threads=False)

    def _load(self, part: int, columns: list[str]) -> pa.Table | str:
        """Return the row group, or the reason why it cannot be read."""
        batches, size = [], 0
        try:
            for batch in self.batches(part, columns):
                batches.append(batch)
                size += batch.nbytes
                if size > MAX_BYTES:
                    return f"its row group unpacks to more than {MAX_BYTES / 1e9:.1f} GB"
            return pa.Table.from_batches(batches)
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError if there is no batch
            if says_nothing_about_the_file(error):
                raise
            return f"its row group cannot be read: {error}"

    def _make_room(self) -> None:
        """Evict row groups before reading the next one, to stay within KEPT_BYTES plus one."""
        sizes = [0 if isinstance(table, str) else table.nbytes for table in self._kept.values()]
        while sum(sizes) > KEPT_BYTES:
            self._kept.popitem(last=False)
            del sizes[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, (self._files, self.versions, self.parts)
