"""A csv or tsv file of image paths and captions, such as CC3M's lists after the download."""

import csv
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from ..errors import BadSampleError, SourceError
from . import Groups, Sample, Source
from .listing import as_text, caption_text, estimated_bytes, groups_by_name, listing_digest, read_regular_file

MAX_MALFORMED = 10_000
"""Limit of rows with a wrong number of columns; beyond it the separator must be wrong."""
_BLOCK_BYTES = 16 << 20
"""Maximum length of a row."""


class CsvSource(Source):
    """Holds the requested columns. Rows are numbered from 0 below the header; rows with a wrong number of columns come
    last, as unreadable samples.

    The first line names the columns. separator: None for a tab if the file is a .tsv or its header has one, else a
    comma. Paths are relative to root, by default the file's folder; caption None: images only.
    Raises SourceError if the file is missing or empty, lacks a column, or has an unclosed quote.
    """

    def __init__(
        self, file: Path, *, image: str = "filepath", caption: str | None = "title", group: str | None = None,
        separator: str | None = None, root: Path | None = None,
    ) -> None:  # fmt: skip
        self.file, self.root = file, root or file.parent
        self.mode = "images" if caption is None else "pairs"
        self._columns = {"image": image, "caption": caption, "group": group}
        table, self._malformed = _read(file, [name for name in (image, caption, group) if name is not None], separator)
        self._paths = table[image]
        self._captions = None if caption is None else table[caption]
        self._groups = None if group is None else table[group]
        if not len(self):
            raise SourceError(f"{file} has a header but no rows")

    def __len__(self) -> int:
        return len(self._paths) + len(self._malformed)

    def __getitem__(self, index: int) -> Sample:
        if index >= len(self._paths):
            raise BadSampleError(self._malformed[index - len(self._paths)])
        caption = None if self._captions is None else caption_text(self._captions[index].as_py())
        group = None if self._groups is None else as_text(self._groups[index].as_py()) or None
        return Sample(self.uri(index), self.key(index), read_regular_file(self._path(index)), caption, group)

    def uri(self, index: int) -> str:
        return as_text(self._paths[index].as_py() if index < len(self._paths) else os.fsencode(self.file))

    def key(self, index: int) -> str:
        return str(index)

    def groups(self) -> Groups | None:
        if self._groups is None:
            return None
        none = pa.array([b""] * len(self._malformed), pa.large_binary())
        return groups_by_name(pa.concat_arrays([self._groups, none]))

    def captions(self, indices: NDArray[np.int64]) -> Iterator[str]:
        if self._captions is None:
            return
        for caption in self._captions.take(pa.array(indices[indices < len(self._captions)])):
            try:
                yield caption_text(caption.as_py())
            except BadSampleError:
                continue

    def stored_bytes(self) -> int:
        return estimated_bytes(self._path, len(self._paths)) if len(self._paths) else 0

    def describe(self) -> dict[str, Any]:
        columns = [column for column in (self._paths, self._captions, self._groups) if column is not None]
        return {
            "kind": "csv",
            "file": as_text(self.file.resolve()),
            "root": as_text(self.root.resolve()),
            **self._columns,
            "listing": listing_digest(*columns),
        }

    def _path(self, index: int) -> bytes:
        return os.path.join(os.fsencode(self.root), self._paths[index].as_py())


def _read(file: Path, columns: list[str], separator: str | None) -> tuple[dict[str, pa.LargeBinaryArray], list[str]]:
    """Return the columns by name, and a message for each malformed row."""
    separator = _check_header(file, columns, separator)
    _check_quotes(file, separator)
    malformed: list[str] = []

    def note(row: pyarrow.csv.InvalidRow) -> str:
        counts = f"has {row.actual_columns} columns, the header has {row.expected_columns}"
        malformed.append(f"row {row.number} of the file, counting the header as row 1, {counts}")
        return "skip" if len(malformed) <= MAX_MALFORMED else "error"

    try:
        table = pyarrow.csv.read_csv(
            file,
            pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),  # with threads, rows are not numbered
            pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=note),
            pyarrow.csv.ConvertOptions(include_columns=columns, column_types=dict.fromkeys(columns, pa.large_binary())),
        )
    except (pa.ArrowException, OSError) as error:
        if len(malformed) > MAX_MALFORMED:
            raise SourceError(f"{file}: over {MAX_MALFORMED:,} malformed rows, the last: {malformed[-1]}") from error
        raise SourceError(f"{file}: {error}") from error
    return {name: table[name].combine_chunks() for name in columns}, malformed


def _check_header(file: Path, columns: list[str], separator: str | None) -> str:
    """Return the separator. Raises SourceError if a column is missing or occurs twice."""
    if not file.is_file():
        raise SourceError(f"{file} is not a file; pass the csv or tsv file that lists the images")
    with file.open("rb") as lines:
        first = lines.readline(_BLOCK_BYTES).decode("utf-8-sig", "backslashreplace")
    separator = separator or ("\t" if file.suffix.lower() == ".tsv" or "\t" in first else ",")
    if len(separator.encode()) != 1:
        raise SourceError(f"the separator {separator!r} is not one ASCII character")
    try:
        header = next(csv.reader([first], delimiter=separator), [])
    except csv.Error as error:
        raise SourceError(f"{file} does not begin with column names: {error}") from error
    for name in columns:
        if header.count(name) != 1:
            there = ", ".join(repr(column) for column in header[:50]) or "none"
            said = "no column" if name not in header else "more than one column"
            raise SourceError(f"{file} has {said} {name!r}; its columns, by its first line: {there}")
    return separator


def _check_quotes(file: Path, separator: str) -> None:
    """Raise SourceError if a quote is never closed: the rows up to the next quote would be lost in it.

    A quote inside unquoted text is text, and so is what follows a closing quote on the same line. But after quoted text
    that spans lines, only a separator or the end of the line may follow.
    """
    ends = separator.encode() + b"\r\n"
    quoted = re.compile(rb'"(?<![^%b]")[^"]*+(?:""[^"]*+)*+("?)' % re.escape(ends))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for found in quoted.finditer(data):
            goes_on = data[found.end() : found.end() + 1] not in ends
            if not found[1] or (goes_on and re.search(rb"[\r\n]", found[0])):
                line = data[: found.start()].count(b"\n") + 1
                raise SourceError(
                    f"{file}: the quote opened in line {line:,} is not closed, so the lines below would become part "
                    "of its text. Close it; inside quoted text, double every quote"
                )
