"""Parquet files with embedded pictures, with optional captions and classes.

Those of a data set on Hugging Face's hub are fetched: `hf://datasets/org/name[@revision][/path]`.
"""

import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from ...storage.arrays import Int64s
from ...storage.bucket import is_address
from ...storage.local import LocalPath
from ...storage.place import AnyPlace, Place
from ..errors import BadSampleError, SourceError
from . import HUB, Account, ClassGroups, Sample, Source, Unused, marks_of
from .listing import (
    binary_arrays,
    caption_texts,
    class_name,
    files_in,
    groups_by_name,
    if_any,
    locate,
    names_below_common_folder,
    read_picture,
    read_regular_file,
    real_root,
    says_nothing_about_the_file,
)
from .source_file import SourceFile, Version

CACHED = re.compile(r".*/datasets--(.+?)--(.+?)/snapshots/")
"""Begins the path of a data set's file in Hugging Face's cache; the revision follows."""
MAX_ROW_GROUP_BYTES = 2 << 30
"""Limit of an unpacked row group, since a worker holds a whole one."""
KEPT_BYTES = 1 << 30
"""Recent row groups are cached up to this size, the last one always: samples are mixed over several groups."""
_ROWS_AT_ONCE = 32
"""Check the limit this often: a page of a few bytes can unpack to one picture a million times."""


class ParquetSource(Source):
    """Reads whole row groups, so rows are cheap only in sequence: see chunks().

    files: parquet files, or folders of them, or addresses on Hugging Face's hub, from which they are fetched.
    image, caption, group: column names; in a list separated by `;`, the first that fits. Pictures are bytes or Hugging
    Face's {bytes, path}; a path is used only without bytes, and only within the file's folder. Captions are text, or
    lists of text: several captions of a picture; of a column that is named alone, also bytes of UTF-8. Classes are
    text or numbers, alone or in a list of one, or named by Hugging Face's ClassLabel, of each file its own. caption
    None, or none of several columns found: images only.
    Raises SourceError if a file is not parquet, lacks a column or has another type in it, or a row group is too large.
    """

    def __init__(
        self,
        files: Sequence[AnyPlace],
        *,
        image: str = "image;jpg;jpeg;png;webp;img",
        caption: str | None = "caption;captions;text;TEXT;prompt;sentences",
        group: str | None = "label;cls",
    ) -> None:
        self.unused = Account()
        self.files = tuple(files_in(chain.from_iterable(map(fetched, files)), ".parquet", self.unused))
        if not self.files:
            raise SourceError(f"there are no parquet files to read{self.unused}")
        self._file_names = names_below_common_folder(self.files)
        parts, versions, self._names_of = list[RowGroup](), list[Version](), list[tuple[str, ...] | None]()
        digest = hashlib.sha256()
        for number, file in enumerate(self.files):
            opened, parquet = _open(file)
            with parquet:
                if number == 0:
                    self._columns = _Columns.choose(file, parquet.schema_arrow, image, caption, group)
                    self._count_unused(parquet.schema_arrow, caption, group)
                _Columns.choose(file, parquet.schema_arrow, *self._columns)
                self._names_of.append(_class_names(parquet.schema_arrow, self._columns.group))
                parts += row_groups_of(file, number, parquet.metadata, self._columns.image)
                size = parquet.metadata.serialized_size + 8  # the footer, with offset and size of every page
                digest.update(opened.read(opened.size - size, size))
            versions.append(opened.version)
        self._listing = digest.hexdigest()
        self._chunks = np.cumsum([0] + [part.rows for part in parts], dtype=np.int64)
        self._versions, self._parts = versions, parts
        self._kept = OrderedDict[int, pa.Table | str]()
        """The row groups that this process read last, or why they cannot be read."""
        self.mode = "images" if self._columns.caption is None else "pairs"
        if not len(self):
            raise SourceError(f"none of {len(self.files)} parquet files, such as {self.files[0]}, has rows")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_kept": OrderedDict()}

    def __len__(self) -> int:
        return int(self._chunks[-1])

    def sample(self, index: int, unchanged_since: int) -> Sample:
        chunk, row = locate(self._chunks, index)
        table = self._table(chunk)
        if row >= len(table):
            raise BadSampleError("its row group has fewer rows than the file says")
        try:
            values = {name: table[name][row].as_py() for name in table.column_names}
        except UnicodeError as error:
            raise BadSampleError("its text is not UTF-8") from error
        captions = (None,) if self._columns.caption is None else _captions(values[self._columns.caption])
        return Sample(
            self.uri(index),
            self.key(index),
            picture=_picture(values[self._columns.image], self.files[self._parts[chunk].file].parent, unchanged_since),
            caption=captions[0],
            group=None if self._columns.group is None else self._group(chunk, values[self._columns.group]),
            further_captions=captions[1:],
        )

    def uri(self, index: int) -> str:
        return f"{self._file_names[self._parts[locate(self._chunks, index)[0]].file]}/{self.key(index)}"

    def key(self, index: int) -> str:
        chunk, row = locate(self._chunks, index)
        return str(self._parts[chunk].first_row + row)

    def groups(self) -> ClassGroups | None:
        if self._columns.group is None:
            return None
        if len({*self._names_of}) > 1 or (names := self._names_of[0]) is None:
            parts = ((locate(self._chunks, start)[0], part) for start, part in self._column(self._columns.group))
            texts = (if_any(self._group, chunk, value).encode() for chunk, part in parts for value in part.to_pylist())
            if (found := groups_by_name(binary_arrays(texts))) is None:
                self.unused["columns of classes without any class"] = Unused(1, self._columns.group)
            return found
        of_sample, none = np.empty(len(self), np.int32), len(names)
        for start, values in self._column(self._columns.group):
            numbers = values.cast(pa.int64(), safe=False).fill_null(-1).to_numpy()
            of_sample[start : start + len(numbers)] = np.where((numbers >= 0) & (numbers < none), numbers, none)
        return ClassGroups(names if of_sample.max() < none else (*names, ""), of_sample)

    def _count_unused(self, schema: pa.Schema, caption: str | None, group: str | None) -> None:
        """Count the columns with text, and with captions or classes of another type, that no sample uses."""
        texts = [field.name for field in schema if _holds_captions(field.type) and field.name not in self._columns]
        if texts:
            cure = f"--group {texts[0]} for classes"
            cure = cure if self._columns.caption else f"--caption {texts[0]} for captions, {cure}"
            self.unused.add("columns of text", ", ".join(texts), cure, len(texts))
        for field in schema:
            name, inner = field.name, field.type.value_type if _is_list(field.type) else field.type
            if name in self._columns or name in texts:
                continue
            if _class_names(schema, name):
                self.unused.add("columns of classes", name, f"--group {name}")
            elif name in (group or "").split(";") and not _holds_classes(field.type):
                self.unused.add("columns of classes that are neither numbers nor text", f"{name} ({field.type})")
            elif pt.is_struct(inner) and not _holds_pictures(inner):
                for part in filter(lambda part: _holds_captions(part.type), inner):
                    where, cure = f"{name}.{part.name}", "write it as a column of its own"
                    self.unused.add("fields of structs with text", where, cure)
            elif name in (caption or "").split(";"):
                self.unused.add("columns of captions that are neither text nor lists of text", f"{name} ({field.type})")

    def captions(self, indices: Int64s) -> Iterator[str]:
        if self._columns.caption is None:
            return
        wanted = np.sort(indices)
        for start, values in self._column(self._columns.caption, wanted):
            first, end = np.searchsorted(wanted, [start, start + len(values)])
            for index in wanted[first:end].tolist():
                try:
                    yield from _captions(values[index - start].as_py())
                except (BadSampleError, UnicodeError):
                    continue

    def chunks(self) -> Int64s:
        return self._chunks

    def stored_bytes(self) -> int:
        return sum(part.picture_bytes for part in self._parts)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "parquet",
            "root": CACHED.sub(HUB + r"\1/\2@", real_root(self.files)),
            "files": len(self.files),
            **self._columns._asdict(),
            "listing": self._listing,
        }

    def marks(self) -> dict[str, str]:
        return marks_of(self._file_names.__getitem__, self._versions)

    def _column(self, name: str, wanted: Int64s | None = None) -> Iterator[tuple[int, pa.Array]]:
        """Yield the column in parts, each with its first index; null where a row group cannot be read.

        wanted: sorted indices; row groups without any of them are left out.
        """
        for chunk, start in enumerate(self._chunks[:-1].tolist()):
            if wanted is not None and np.diff(np.searchsorted(wanted, self._chunks[chunk : chunk + 2])) == 0:
                continue
            end, kind = int(self._chunks[chunk + 1]), pa.null()
            try:
                for batch in self._batches(chunk, [name]):
                    values = batch.column(0)[: end - start]
                    yield start, values
                    start, kind = start + len(values), values.type
            except (pa.ArrowException, OSError) as error:
                if says_nothing_about_the_file(error):
                    raise  # any other error is reported when its samples are read
            if start < end:
                yield start, pa.nulls(end - start, kind)

    def _table(self, chunk: int) -> pa.Table:
        """Return a row group. Raises BadSampleError if it cannot be read."""
        if chunk not in self._kept:
            self._make_room()
            self._kept[chunk] = self._load(chunk)
        self._kept.move_to_end(chunk)
        if isinstance(found := self._kept[chunk], str):
            raise BadSampleError(found)
        return found

    def _batches(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        group = self._parts[chunk]
        file = SourceFile(self.files[group.file], self._versions[group.file])
        with pq.ParquetFile(file.reader()) as parquet:
            yield from parquet.iter_batches(_ROWS_AT_ONCE, [group.number], columns, use_threads=False)

    def _load(self, chunk: int) -> pa.Table | str:
        """Return the row group, or the reason why it cannot be read."""
        batches, size = [], 0
        try:
            for batch in self._batches(chunk, [name for name in self._columns if name is not None]):
                batches.append(batch)
                size += batch.nbytes
                if size > MAX_ROW_GROUP_BYTES:
                    return f"its row group unpacks to more than {MAX_ROW_GROUP_BYTES / 1e9:.1f} GB"
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

    def _group(self, chunk: int, value: Any) -> str | None:
        if (names := self._names_of[self._parts[chunk].file]) is None:
            return class_name(value)
        return names[value] if value is not None and 0 <= value < len(names) else None


class _Columns(NamedTuple):
    image: str
    caption: str | None
    group: str | None

    @classmethod
    def choose(cls, file: Place, schema: pa.Schema, image: str, caption: str | None, group: str | None) -> Self:
        """Raises SourceError if there is no picture column, or if the only column given for an option does not fit."""
        is_named = ";" not in (caption or ";")  # bytes may be anything, unless one says that they are captions
        holds = (lambda kind: _holds_captions(kind) or _is_bytes(kind)) if is_named else _holds_captions
        pictures = _column_of(file, schema, image, _holds_pictures, "pictures: bytes or {bytes, path}")
        if pictures is None:
            raise SourceError(f"{file} has no pictures in any of {image}; {_columns_there(schema)}")
        return cls(
            pictures,
            caption and _column_of(file, schema, caption, holds, "captions: text or lists of text"),
            group and _column_of(file, schema, group, _holds_classes, "classes: numbers or text"),
        )


def _column_of(
    file: Place, schema: pa.Schema, option: str, fits: Callable[[pa.DataType], bool], wanted: str
) -> str | None:
    names = option.split(";")
    for name in names:
        place = schema.get_field_index(name)  # -1 if it is missing or occurs twice
        if place >= 0 and fits(schema.field(place).type):
            return name
    if len(names) == 1:
        raise SourceError(f"{file} has no column {option!r} of {wanted}; {_columns_there(schema)}")
    return None


def _columns_there(schema: pa.Schema) -> str:
    return "its columns: " + ", ".join(f"{field.name!r} ({field.type})" for field in list(schema)[:50])


def _holds_pictures(kind: pa.DataType) -> bool:
    if pt.is_struct(kind):
        place = kind.get_field_index("bytes")
        kind = kind.field(place).type if place >= 0 else kind
    return _is_bytes(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_binary_view(kind))


def _holds_captions(kind: pa.DataType) -> bool:
    return _is_text(kind.value_type if _is_list(kind) else kind)


def _holds_classes(kind: pa.DataType) -> bool:
    kind = kind.value_type if _is_list(kind) else kind
    return _is_text(kind) or any(of(kind) for of in (pt.is_integer, pt.is_floating, pt.is_boolean, pt.is_decimal))


def _is_list(kind: pa.DataType) -> bool:
    kinds = pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view, pt.is_large_list_view
    return any(of(kind) for of in kinds)


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pt.is_dictionary(kind) else kind
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _class_names(schema: pa.Schema, column: str | None) -> tuple[str, ...] | None:
    """Return the names that Hugging Face stores in the schema for this column's integers."""
    if column is None or not pt.is_integer(schema.field(column).type):
        return None
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) and name for name in names) else None


def _picture(value: bytes | dict[str, Any] | None, folder: Place, unchanged_since: int) -> bytes:
    if isinstance(value, dict):
        data, path = value.get("bytes"), value.get("path")
        if data is None and path is not None and folder.is_remote:
            if is_address(path):
                raise BadSampleError(f"its path {path!r} leads out of the parquet file's folder")
            return read_picture(folder, path.encode(), unchanged_since)
        value = data if data is not None or path is None else read_regular_file(_below(folder, path), unchanged_since)
    if value is None:
        raise BadSampleError("no picture: neither bytes nor a path")
    return value


def _below(folder: Place, path: str | bytes) -> bytes:
    """Return a path named by a file, with links resolved. Raises BadSampleError if it leaves the folder."""
    try:
        root = os.path.realpath(os.fsencode(str(folder)))
        target = os.path.realpath(os.path.join(root, os.fsencode(path)))
    except (ValueError, TypeError) as error:
        raise BadSampleError(f"not the name of a file: {error}") from error
    if os.path.commonpath([root, target]) != root:
        raise BadSampleError(f"its path {path!r} leads out of the parquet file's folder")
    return target


def _captions(value: str | bytes | list[str | None] | None) -> tuple[str, ...]:
    return caption_texts(value if isinstance(value, list) else [value])


def _open(file: Place) -> tuple[SourceFile, pq.ParquetFile]:
    if not file.is_remote and not file.is_file():
        raise SourceError(f"{file} is not a file; pass the parquet files or their folder")
    try:
        opened = SourceFile(file)
        return opened, pq.ParquetFile(opened.reader())
    except FileNotFoundError as error:
        raise SourceError(str(error)) from None
    except (pa.ArrowException, OSError) as error:
        if says_nothing_about_the_file(error):
            raise
        raise SourceError(f"{file} is no complete parquet file: {error}; download it again or leave it out") from error


def fetched(place: AnyPlace) -> list[AnyPlace]:
    """Return the files of a hub's address in Hugging Face's cache, after fetching what is missing; else the place.

    Its path names a file, or says how files' paths begin, and may have `*`; others may be cached. Raises SourceError.
    """
    if not str(place).startswith(HUB):
        return [place]
    from huggingface_hub import parse_hf_uri, snapshot_download

    try:
        found = parse_hf_uri(str(place))
        only = found.path_in_repo + "*.parquet" * (not found.path_in_repo.endswith(".parquet"))
        folder = Path(snapshot_download(found.id, repo_type="dataset", revision=found.revision, allow_patterns=only))
    except Exception as error:  # of the network, the hub, the disk
        raise SourceError(f"{place} cannot be fetched: {' '.join(str(error).split())[:300]}") from error
    return [LocalPath(file) for file in folder.rglob("*.parquet") if fnmatchcase(str(file.relative_to(folder)), only)]


class RowGroup(NamedTuple):
    file: int
    number: int
    """Number of the row group within its file."""
    first_row: int
    """Index of its first row within its file."""
    rows: int
    picture_bytes: int


def row_groups_of(path: Place, file: int, metadata: pq.FileMetaData, image: str) -> Iterator[RowGroup]:
    """Yield the row groups of a file that have rows. Raises SourceError if one exceeds MAX_ROW_GROUP_BYTES."""
    first_row = 0
    for number in range(metadata.num_row_groups):
        part = metadata.row_group(number)
        columns = [part.column(i) for i in range(part.num_columns)]
        leaves = [column for column in columns if f"{column.path_in_schema}.".startswith(f"{image}.")]  # image.bytes
        size = sum(leaf.total_uncompressed_size for leaf in leaves)
        if size > MAX_ROW_GROUP_BYTES:
            large = f"row group {number} holds {size / 1e9:.1f} GB of pictures, above {MAX_ROW_GROUP_BYTES / 1e9:.1f}"
            raise SourceError(f"{path}: {large}; rewrite the file with smaller ones (row_group_size=1000 in pyarrow)")
        if part.num_rows > 0:
            yield RowGroup(file, number, first_row, part.num_rows, size)
            first_row += part.num_rows
