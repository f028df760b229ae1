"""A csv or tsv file of image paths and captions, such as CC3M's lists after the download.

The file is read once, by Python's csv reader, into an Arrow file in TMPDIR, so that memory does not grow with the list.
A worker receives the rows of its shard and never sees the list.
"""

import csv
import hashlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...storage.files import NotRegularFileError
from ...storage.place import AnyPlace, Place, place_of
from ..errors import BadSampleError, SourceError
from . import NEVER, BadSample, ClassGroups, Read, Sample, Source, Work
from .listing import (
    OBJECT,
    as_text,
    caption_text,
    estimated_bytes,
    groups_by_name,
    read_picture,
    resolved_text,
)
from .source_file import SourceFile

MAX_ROW_BYTES = 16 << 20
MAX_MALFORMED = 10_000
"""Limit of rows with a wrong number of columns; beyond it the separator must be wrong."""
BLOCK_CHARACTERS = 1 << 16
"""Characters that are read at once: of more rows, Python's garbage collector takes more time than its csv reader."""
BLOCKS_AT_ONCE = 64
"""Blocks that are written at once."""
_END = "the end\n"
"""A row after the lines of a block: it is one of its own unless a quote is open."""
_TRIED_PICTURES = 100
_SCHEMA = pa.schema([(name, pa.large_binary()) for name in ("image", "caption", "group", "problem")])


class CsvSource(Source):
    """Rows are numbered from 0 below the header; rows with a wrong number of columns come last, as unreadable samples.

    The first line names the columns. separator: None for a tab if the file is a .tsv or its header has one, else a
    comma. Paths are relative to root, by default the file's folder; caption None: images only.
    Raises SourceError if the file is missing or empty, lacks a column, has an unclosed quote or a row above
    MAX_ROW_BYTES, or too many rows are malformed.
    """

    def __init__(
        self,
        file: AnyPlace,
        *,
        image: str = "filepath",
        caption: str | None = "title",
        group: str | None = None,
        separator: str | None = None,
        root: AnyPlace | None = None,
    ) -> None:
        self.file = place_of(file)
        self.root = place_of(root or self.file.parent)
        self.mode = "images" if caption is None else "pairs"
        self._names = {"image": image, "caption": caption, "group": group}
        self._rows, self._digest = _read_once(_opened(self.file), self._names, separator)
        self._sound = self._rows["problem"].null_count
        if not len(self):
            raise SourceError(f"{file} has a header but no rows")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_rows": _SCHEMA.empty_table()}  # a worker gets those of its shard

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(index, self._row(index), NEVER)

    def _row(self, index: int) -> dict[str, bytes | None]:
        row: dict[str, bytes | None] = self._rows.slice(index, 1).to_pylist()[0]
        return row

    def _sample(self, index: int, row: dict[str, bytes | None], unchanged_since: int) -> Sample:
        if row["problem"] is not None:
            raise BadSampleError(row["problem"].decode())
        caption = caption_text(row["caption"]) if self.mode == "pairs" else None
        picture = read_picture(self.root, row["image"] or b"", unchanged_since)
        return Sample(as_text(row["image"] or b""), str(index), picture, caption, as_text(row["group"] or b"") or None)

    def uri(self, index: int) -> str:
        return as_text(self._row(index)["image"] or b"")

    def key(self, index: int) -> str:
        return str(index)

    def work(self, indices: NDArray[np.int64], unchanged_since: int = NEVER) -> Work:
        return Work(indices, unchanged_since, self._rows.take(indices).combine_chunks())

    def read(self, work: Work) -> Iterator[Read]:
        for index, row in zip(work.indices.tolist(), work.rows.to_pylist(), strict=True):
            try:
                yield Read(index, self._sample(index, row, work.unchanged_since))
            except BadSampleError as error:
                yield Read(index, BadSample(as_text(row["image"]), str(index), str(error)))

    def groups(self) -> ClassGroups | None:
        return groups_by_name(self._rows["group"].chunks) if self._names["group"] else None

    def captions(self, indices: NDArray[np.int64]) -> Iterator[str]:
        if self.mode == "images":
            return
        for caption in self._rows["caption"].take(indices).to_pylist():
            try:
                yield caption_text(caption)
            except BadSampleError:
                continue

    def refuse_wrong_root(self) -> None:
        """Raise SourceError if none of some evenly spread pictures exists; in an object store, nothing is asked."""
        names = [self._path(index) for index in range(0, self._sound, max(1, self._sound // _TRIED_PICTURES))]
        if self.root.is_remote or not names or any(name.startswith(OBJECT) for name in names):
            return
        paths = [os.path.join(os.fsencode(str(self.root)), name) for name in names]
        if not any(map(os.path.lexists, paths)):
            raise SourceError(
                f"none of {len(names):,} pictures tried exists, such as {os.fsdecode(paths[0])}; paths in "
                f"{self.file} are relative to its folder, or to the folder given by --root"
            )

    def stored_bytes(self) -> int | None:
        return estimated_bytes(self.root, self._path, self._sound) if self._sound else 0

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "csv",
            "file": resolved_text(self.file),
            "root": resolved_text(self.root),
            **self._names,
            "listing": self._digest,
        }

    def marks(self) -> dict[str, str]:
        return {as_text(self.file.name): self._digest}

    def _path(self, index: int) -> bytes:
        return self._row(index)["image"] or b""


def _opened(file: Place) -> SourceFile:
    try:
        return SourceFile(file)
    except (NotRegularFileError, FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{file} is not a file; pass the csv or tsv file that lists the images") from None


class _Hashed(io.RawIOBase):
    """Hashes a file while it is read."""

    def __init__(self, file: SourceFile) -> None:
        self._reader, self.sha256 = file.reader(), hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        count = self._reader.readinto(memory)
        self.sha256.update(memory[:count])
        return count


def _read_once(opened: SourceFile, names: dict[str, str | None], separator: str | None) -> tuple[pa.Table, str]:
    """Return the rows, mapped from a file, and the sha256 of the list."""
    wanted = {option: name for option, name in names.items() if name is not None}
    header, separator = _header(opened, wanted, separator)
    places = [header.index(wanted[name]) if name in wanted else None for name in _SCHEMA.names]
    file, number = _Hashed(opened), 0
    batches, malformed = list[pa.RecordBatch](), list[dict[str, bytes]]()
    with tempfile.NamedTemporaryFile(prefix="thermopile-rows-") as kept:
        with pa.OSFile(kept.name, "wb") as written, pa.ipc.new_file(written, _SCHEMA) as writer:
            for rows in _blocks(opened.place, file, separator):
                sound = [row for row in rows if len(row) == len(header)]
                if len(sound) < len(rows):
                    for place, row in enumerate(rows, start=number + 1):
                        if len(row) != len(header) and place > 1:
                            malformed.append(_malformed(opened.place, place, len(row), len(header)))
                            _refuse_many(opened.place, malformed)
                if number == 0 and rows and len(rows[0]) == len(header):
                    del sound[0]
                batches.append(pa.record_batch([_column(sound, place) for place in places], schema=_SCHEMA))
                number += len(rows)
                if len(batches) == BLOCKS_AT_ONCE:
                    writer.write_table(pa.Table.from_batches(batches).combine_chunks())
                    batches.clear()
            batches.append(pa.RecordBatch.from_pylist(malformed, _SCHEMA))
            writer.write_table(pa.Table.from_batches(batches).combine_chunks())
        return pa.ipc.open_file(pa.memory_map(kept.name)).read_all(), file.sha256.hexdigest()


def _malformed(file: Place, number: int, columns: int, of_header: int) -> dict[str, bytes]:
    problem = f"row {number} of the file, counting the header as row 1, has {columns} columns"
    problem += f", the header has {of_header}"
    return {"image": os.fsencode(str(file)), "group": b"", "problem": problem.encode()}


def _refuse_many(file: Place, malformed: list[dict[str, bytes]]) -> None:
    if len(malformed) > MAX_MALFORMED:
        last = malformed[-1]["problem"].decode()
        raise SourceError(f"{file}: over {MAX_MALFORMED:,} malformed rows, the last: {last}")


def _column(rows: list[list[str]], place: int | None) -> pa.LargeBinaryArray:
    if place is None:
        return pa.nulls(len(rows), pa.large_binary())
    values = [row[place] for row in rows]
    try:
        return pa.array(values, pa.large_string()).view(pa.large_binary())
    except UnicodeEncodeError:  # bytes that are not UTF-8
        return pa.array([value.encode("utf-8", "surrogateescape") for value in values], pa.large_binary())


def _blocks(file: Place, opened: io.RawIOBase, separator: str) -> Iterator[list[list[str]]]:
    """Yield the rows that are not empty, the header first, by the list, as a loop over single rows takes twice as long.

    Raises SourceError for an unclosed quote or a long row.
    """
    text = io.TextIOWrapper(io.BufferedReader(opened, 1 << 20), "utf-8-sig", "surrogateescape", newline="")
    rest, row, line = "", 1, 1
    """What was read and not used, and the numbers of its first row and line."""

    def refuse(raw: str, before: Sequence[str] = ()) -> None:
        if (at := _unclosed_quote(raw, separator)) is not None:
            opens = line + "".join(before).count("\n") + raw.count("\n", 0, at)
            raise SourceError(
                f"{file}: the quote opened in line {opens:,} is not closed, so the lines below would become part of "
                "its text. Close it; inside quoted text, double every quote"
            )

    limit = csv.field_size_limit(2 * MAX_ROW_BYTES + BLOCK_CHARACTERS)
    try:
        while (piece := text.read(max(BLOCK_CHARACTERS, len(rest)))) or rest:
            lines = [*io.StringIO(rest + piece, newline="")]
            last = lines.pop() if piece else ""  # may go on in the next piece
            rows, used = _rows_of(lines, separator, refuse)
            yield (sound := [each for each in rows if each])
            row, line = row + len(sound), line + "".join(lines[:used]).count("\n")
            rest = "".join([*lines[used:], last])
            if not piece or len(rest) > MAX_ROW_BYTES:
                if rest:
                    refuse(rest)
                if not piece:
                    break
                raise SourceError(f"{file}: row {row:,} has more than {MAX_ROW_BYTES:,} bytes; shorten it")
    finally:
        csv.field_size_limit(limit)


def _rows_of(
    lines: list[str], separator: str, refuse: Callable[[str, Sequence[str]], None]
) -> tuple[list[list[str]], int]:
    """Return the rows that end in these lines, and the number of their lines. refuse: see _blocks."""
    rows = [*csv.reader([*lines, _END], delimiter=separator)]
    if len(rows) == len(lines) + 1:
        return rows[:-1], len(lines)
    reader, used = csv.reader([*lines, _END], delimiter=separator), 0
    for number, _ in enumerate(reader):
        if reader.line_num > len(lines):  # the end itself, or a row that it became part of
            return rows[:number], used
        if reader.line_num > used + 1:
            refuse("".join(lines[used : reader.line_num]), lines[:used])
        used = reader.line_num
    return rows, used


def _unclosed_quote(row: str, separator: str) -> int | None:
    """Return where a quote opens that is not closed in a row, or most likely was not: its text spans lines, and more
    text follows the closing quote. Otherwise text may follow one."""
    rest = rf"[^{re.escape(separator)}\r\n]*"
    quoted, plain, at = re.compile(rf'"((?:[^"]++|"")*+)"({rest})'), re.compile(rest), 0
    while at < len(row):
        found = (quoted if row[at] == '"' else plain).match(row, at)
        if not found or (found.re is quoted and found[2] and re.search("[\\r\\n]", found[1])):
            return at
        at = found.end() + 1
    return None


def _header(opened: SourceFile, columns: dict[str, str], separator: str | None) -> tuple[list[str], str]:
    """Return the names of the columns, and the separator. Raises SourceError if a column is missing or occurs twice.

    columns: option that names a column -> its name.
    """
    file = opened.place
    first = io.TextIOWrapper(opened.reader(), "utf-8-sig", "backslashreplace", newline="").readline(MAX_ROW_BYTES)
    separator = separator or ("\t" if file.name.lower().endswith(".tsv") or "\t" in first else ",")
    if len(separator.encode()) != 1:
        raise SourceError(f"the separator {separator!r} is not one ASCII character")
    try:
        header = next(csv.reader([first], delimiter=separator), [])
    except csv.Error as error:
        raise SourceError(f"{file} does not begin with column names: {error}") from error
    for option, name in columns.items():
        if header.count(name) != 1:
            there = ", ".join(repr(column) for column in header[:50]) or "none"
            said = "no column" if name not in header else "more than one column"
            raise SourceError(
                f"{file} has {said} {name!r}; its columns, by its first line: {there}. Name "
                f"the right one with --{option}"
            )
    return header, separator
