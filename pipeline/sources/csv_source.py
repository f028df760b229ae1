"""A csv or tsv file of image paths and captions, such as CC3M's lists after the download."""

import csv
import os
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...storage.files import NotRegularFileError
from ...storage.place import AnyPlace, Place, place_of
from ..errors import BadSampleError, SourceError
from . import NEVER, Groups, Sample, Source
from .csv_rows import CsvRows
from .listing import (
    OBJECT,
    as_text,
    binary_arrays,
    caption_text,
    estimated_bytes,
    groups_by_name,
    read_picture,
    resolved_text,
)
from .source_file import SourceFile

_MAX_HEADER_BYTES = 16 << 20
_TRIED_PICTURES = 100


class CsvSource(Source):
    """Finds the rows of the list; their texts stay in the file. Rows are numbered from 0 below the header; rows with a
    wrong number of columns come last, as unreadable samples.

    The first line names the columns. separator: None for a tab if the file is a .tsv or its header has one, else a
    comma. Paths are relative to root, by default the file's folder; caption None: images only.
    Raises SourceError if the file is missing or empty, lacks a column, or has an unclosed quote.
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
        file = place_of(file)
        self.file, self.root = file, place_of(root or file.parent)
        self.mode = "images" if caption is None else "pairs"
        self._names = {"image": image, "caption": caption, "group": group}
        wanted = {option: name for option, name in self._names.items() if name is not None}
        opened = _opened(file)
        header, separator = _header(opened, wanted, separator)
        self._rows = CsvRows(opened, separator, len(header), tuple(map(header.index, wanted.values())))
        self._has_group = group is not None
        if not len(self):
            raise SourceError(f"{file} has a header but no rows")

    def __len__(self) -> int:
        return len(self._rows) + len(self._rows.malformed)

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index, NEVER)

    def sample(self, index: int, unchanged_since: int) -> Sample:
        if index >= len(self._rows):
            raise BadSampleError(self._rows.malformed[index - len(self._rows)])
        caption = caption_text(self._rows[index][1]) if self.mode == "pairs" else None
        group = as_text(self._rows[index][-1]) or None if self._has_group else None
        picture = read_picture(self.root, self._path(index), unchanged_since)
        return Sample(self.uri(index), self.key(index), picture, caption, group)

    def uri(self, index: int) -> str:
        return as_text(self._path(index) if index < len(self._rows) else str(self.file))

    def key(self, index: int) -> str:
        return str(index)

    def groups(self) -> Groups | None:
        if not self._has_group:
            return None
        none = [b""] * len(self._rows.malformed)
        return groups_by_name(binary_arrays(chain((row[-1] for row in self._rows), none)))

    def captions(self, indices: NDArray[np.int64]) -> Iterator[str]:
        if self.mode == "images":
            return
        for index in indices[indices < len(self._rows)].tolist():
            try:
                yield caption_text(self._rows[index][1])
            except BadSampleError:
                continue

    def refuse_wrong_root(self) -> None:
        """Raise SourceError if none of some evenly spread pictures exists; in an object store, nothing is asked."""
        rows = len(self._rows)
        names = [self._path(index) for index in range(0, rows, max(1, rows // _TRIED_PICTURES))]
        if self.root.is_remote or not names or any(name.startswith(OBJECT) for name in names):
            return
        paths = [os.path.join(os.fsencode(str(self.root)), name) for name in names]
        if not any(map(os.path.lexists, paths)):
            raise SourceError(
                f"none of {len(names):,} pictures tried exists, such as {os.fsdecode(paths[0])}; paths in "
                f"{self.file} are relative to its folder, or to the folder given by --root"
            )

    def stored_bytes(self) -> int | None:
        return estimated_bytes(self.root, self._path, len(self._rows)) if len(self._rows) else 0

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "csv",
            "file": resolved_text(self.file),
            "root": resolved_text(self.root),
            **self._names,
            "listing": self._rows.digest,
        }

    def marks(self) -> dict[str, str]:
        return {as_text(self.file.name): self._rows.digest}

    def _path(self, index: int) -> bytes:
        return self._rows[index][0]


def _opened(file: Place) -> SourceFile:
    try:
        return SourceFile(file)
    except (NotRegularFileError, FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{file} is not a file; pass the csv or tsv file that lists the images") from None


def _header(opened: SourceFile, columns: dict[str, str], separator: str | None) -> tuple[list[str], str]:
    """Return the names of the columns, and the separator. Raises SourceError if a column is missing or occurs twice.

    columns: option that names a column -> its name.
    """
    file = opened.place
    first = opened.reader().readline(_MAX_HEADER_BYTES).decode("utf-8-sig", "backslashreplace")
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
