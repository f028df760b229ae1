"""The rows of a csv or tsv file, read once, by Python's csv reader, into an Arrow file in TMPDIR.

Whether quotes enclose texts or belong to them is decided per file. pandas quotes single fields even in a tsv, and the
lists of CC3M, CC12M and LAION have no quoting: read by csv's rules, a caption that begins with a quote takes in all
lines up to the next closing quote.
"""

import csv
import hashlib
import io
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, repeat
from typing import Literal, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import SourceError
from .listing import WHOLE
from .source_file import SourceFile

MAX_ROW_BYTES = 16 << 20
MAX_MALFORMED = 10_000
"""Limit of rows with a wrong number of columns; beyond it the separator must be wrong."""
ROWS_AT_ONCE = 1_000
"""Rows that are read at once: of more, Python's garbage collector takes more time than its csv reader."""
BATCHES_AT_ONCE = 64
"""Times as many rows are written at once."""
SCHEMA = pa.schema([(name, pa.large_binary()) for name in ("image", "caption", "group", "problem")])
Quoting: TypeAlias = Literal["csv", "none"]
_FEWER = 10
"""If neither reading fits, the one without quoting must lose this many times fewer rows to be chosen."""
_LINE_END = re.compile(r"\r\n?|\n")
_PICTURE = re.compile(r"(?i)://|\.(jpe?g|png|webp|gif|bmp|tiff?)$")


class Listing(NamedTuple):
    """The rows of a list, those with a wrong number of columns last."""

    rows: pa.Table
    digest: str
    """sha256 of the file."""
    quoting: Quoting
    notes: tuple[str, ...] = ()
    """What the user should know about the choice of quoting."""
    unused: tuple[str, ...] = ()
    """Names of the columns that are not read."""


class _UnfitError(SourceError):
    """A list cannot be read in this way."""


class _Layout(NamedTuple):
    """What the first line says of a list."""

    columns: list[str]
    separator: str
    encoding: tuple[str, str]
    """Name of the encoding, and what is done with bytes that are wrong in it."""
    skipped: int
    """Lines above the names of the columns."""
    has_blanks: bool
    """Whether blanks surround the names, and so the texts below."""
    has_quotes: bool
    """Whether a name is quoted, and so the list has quoting."""


def read_list(
    opened: SourceFile, names: dict[str, str | None], separator: str | None, quoting: Quoting | None
) -> Listing:
    """Read the list, by csv's rules if they fit, else without quoting if that fits; see CsvSource for the errors.

    Csv's rules fit if all quoted texts are well formed, all rows have the header's columns, and no quoted text holds
    both a line break and the separator. Where neither fits, they stay unless they lose far more rows.
    """
    wanted = {option: name for option, name in names.items() if name is not None}
    layout = _layout(opened, wanted, separator, quoting)
    places = [layout.columns.index(wanted[name]) if name in wanted else None for name in SCHEMA.names]
    if quoting is not None:
        return _Reading(opened, layout, quoting).listing(places)
    by_rules, plain, file = _Reading(opened, layout, "csv"), _Reading(opened, layout, "none"), opened.place
    try:
        listing, refusal = by_rules.listing(places), None
    except _UnfitError as error:
        listing, refusal = None, error
    if listing and (layout.has_quotes or not (by_rules.defect and by_rules.differing)):
        note = f"{file}: quotes around texts were removed, by csv's rules; {by_rules.differing_rows()} would keep them "
        note += "with --quoting none"
        return listing._replace(notes=(note,)) if by_rules.differing and by_rules.plain_fits else listing
    with suppress(_UnfitError):
        other = plain.listing(places)
        if not layout.has_quotes and (not plain.lost or _FEWER * plain.lost < by_rules.lost):
            note = f"{file}: read without quoting, since {by_rules.defect}; {plain.differing_rows()} would "
            return other._replace(notes=(f"{note}differ with --quoting csv",))
    if listing is None:
        raise refusal or AssertionError
    note = f"{file}: read by csv's rules although {by_rules.defect}; --quoting none takes quotes as a part of the texts"
    return listing._replace(notes=(note,))


class _Reading:
    """One pass over a list in one of the two ways, which also counts what does not fit."""

    def __init__(self, opened: SourceFile, layout: _Layout, quoting: Quoting) -> None:
        self._opened, self._layout, self._quoting = opened, layout, quoting
        self._reader = partial(csv.reader, delimiter=layout.separator, skipinitialspace=layout.has_blanks)
        self._line = 1 + layout.skipped
        """Number of the first line of the rows that are read."""
        self._strict = True
        """Whether all quoted texts so far are well formed."""
        self.defect: str | None = None
        """The first thing against csv's rules."""
        self.lost = 0
        """Malformed rows, and lines within quoted texts that hold the separator too."""
        self.plain_fits = quoting == "csv" and not layout.has_quotes
        """Whether all lines so far have the header's columns without quoting."""
        self.differing = 0
        """Lines with a text that begins with a quote; not counted on if csv's rules turn out to be the only ones."""
        self._example = ""

    def differing_rows(self) -> str:
        return f"{self.differing:,} row{'s' * (self.differing > 1)}, such as {self._example},"

    def listing(self, places: list[int | None]) -> Listing:
        """Read the list. places: columns of SCHEMA's fields."""
        number, columns = 1, len(self._layout.columns)
        batches, malformed = list[pa.RecordBatch](), list[dict[str, bytes]]()
        with tempfile.NamedTemporaryFile(prefix="thermopile-rows-") as kept:
            with pa.OSFile(kept.name, "wb") as written, pa.ipc.new_file(written, SCHEMA) as writer:
                for rows in self._rows():
                    sound = [row for row in rows if len(row) == columns]
                    if len(sound) < len(rows):
                        for place, row in enumerate(rows, start=number + 1):
                            if len(row) != columns:
                                malformed.append(self._malformed(place, len(row), len(malformed)))
                    found = map(self._column, repeat(sound), SCHEMA.names, places)
                    batches.append(pa.record_batch([*found], schema=SCHEMA))
                    number += len(rows)
                    if len(batches) == BATCHES_AT_ONCE:
                        writer.write_table(pa.Table.from_batches(batches).combine_chunks())
                        batches.clear()
                batches.append(pa.RecordBatch.from_pylist(malformed, SCHEMA))
                writer.write_table(pa.Table.from_batches(batches).combine_chunks())
            table = pa.ipc.open_file(pa.memory_map(kept.name)).read_all()
        others = tuple(name for place, name in enumerate(self._layout.columns) if name and place not in places)
        with self._opened.reader() as file:
            return Listing(table, hashlib.file_digest(file, "sha256").hexdigest(), self._quoting, unused=others)

    def _malformed(self, number: int, columns: int, before: int) -> dict[str, bytes]:
        problem = f"row {number} of the file, counting the header as row 1, has {columns} columns"
        problem += f", the header has {len(self._layout.columns)}"
        self.defect, self.lost = self.defect or problem, self.lost + 1
        if before == MAX_MALFORMED:
            raise _UnfitError(f"{self._opened.place}: over {MAX_MALFORMED:,} malformed rows, the last: {problem}")
        return {"image": os.fsencode(str(self._opened.place)), "group": b"", "problem": problem.encode()}

    def _column(self, rows: list[list[str]], name: str, place: int | None) -> pa.LargeBinaryArray:
        if place is None:
            return pa.nulls(len(rows), pa.large_binary())
        values = [row[place] for row in rows]
        if self._layout.has_blanks:
            values = [value.strip() for value in values]
        try:
            texts = pa.array(values, pa.large_string())
            if name == "group":
                texts = pc.replace_substring_regex(pc.utf8_trim_whitespace(texts), WHOLE, r"\1")
            return texts.view(pa.large_binary())
        except UnicodeEncodeError:  # bytes that are not UTF-8
            named = [re.sub(WHOLE, r"\1", value.strip()) if name == "group" else value for value in values]
            return pa.array([value.encode("utf-8", "surrogateescape") for value in named], pa.large_binary())

    def _rows(self) -> Iterator[list[list[str]]]:
        """Yield the rows below the header that are not empty, many at once: a loop over rows takes twice as long.

        Raises _UnfitError for an unclosed quote or a long line or text.
        """
        text = io.TextIOWrapper(self._opened.reader(), *self._layout.encoding, newline="")
        for _ in range(self._layout.skipped):
            text.readline(MAX_ROW_BYTES)
        pieces, lines = iter(partial(text.readline, MAX_ROW_BYTES), ""), list[str]()
        is_strict, is_first = self._quoting == "csv", True

        def noted(source: Iterable[str]) -> Iterator[str]:
            for line in source:
                lines.append(line)
                if len(line) >= MAX_ROW_BYTES:
                    raise csv.Error
                yield line

        reader = self._reader(
            noted(pieces), quoting=csv.QUOTE_MINIMAL if is_strict else csv.QUOTE_NONE, strict=is_strict
        )
        limit = csv.field_size_limit(MAX_ROW_BYTES)
        try:
            while True:
                rows = list[list[str]]()
                with suppress(csv.Error):  # a malformed text, or a text or line above the limit
                    rows = [*islice(reader, ROWS_AT_ONCE)]
                if not rows and is_strict and lines:
                    is_strict, reader = False, self._reader(noted(chain([*lines], pieces)))
                    lines.clear()
                    continue
                if not lines:
                    return
                if '"' in "".join(lines):
                    self._count_quotes(lines)
                    if self._quoting == "csv" and not (is_strict and len(rows) == len(lines)):
                        self._judge(lines)
                if not rows:
                    where = f"{self._opened.place}: a row in line {self._line + len(lines) - 1:,}"
                    raise _UnfitError(f"{where} has more than {MAX_ROW_BYTES:,} bytes; shorten it")
                yield [row for row in rows if row][is_first:]
                self._line, is_first = self._line + len(lines), False
                lines.clear()
        finally:
            csv.field_size_limit(limit)

    def _count_quotes(self, lines: list[str]) -> None:
        """Count the lines that the two ways read differently, and see whether all fit without quoting."""
        if self._quoting == "csv" and self.differing and not self.plain_fits:
            return
        mark = '"' if self._layout.has_blanks else self._layout.separator + '"'
        opening = [place for place, line in enumerate(lines) if mark in line or line[0] == '"']
        if opening and not self.differing:
            self._example = f"line {self._line + opening[0]:,}: {lines[opening[0]][:80].strip()}"
        self.differing += len(opening)
        if self.plain_fits:
            columns = {0, len(self._layout.columns)}
            self.plain_fits = columns >= {*map(len, self._reader(lines, quoting=csv.QUOTE_NONE))}

    def _judge(self, lines: list[str]) -> None:
        """Count against csv's rules what the rows of these lines have. Raises _UnfitError for an unclosed quote."""
        reader, used = self._reader(lines), 0
        while used < len(lines):
            row, number = list[str](), self._line + used
            with suppress(csv.Error):
                row = next(reader)
            own = lines[used : reader.line_num]
            used = reader.line_num
            if '"' not in "".join(own):
                continue
            self._refuse_unclosed("".join(own), number)
            if len(own) > 1 and any(self._layout.separator in text and _LINE_END.search(text) for text in row):
                self.lost += len(own) - 1
                self.defect = self.defect or f"a quoted text in line {number:,} holds line breaks and the separator"
            try:
                [*self._reader(own if self._strict else (), strict=True)]
            except csv.Error:
                self._strict, self.defect = False, self.defect or f"text follows the closing quote in line {number:,}"
                if '\\"' in "".join(own):
                    self.defect = f'line {number:,} has \\" within quoted text'
                    raise _UnfitError(
                        f"{self._opened.place}: {self.defect}, where csv doubles the quote. Write it so, or pass "
                        "--quoting none if quotes belong to the texts"
                    ) from None

    def _refuse_unclosed(self, row: str, number: int) -> None:
        """Refuse a quote that is not closed in a row, or most likely was not: its text spans lines, and more text
        follows the closing quote. Otherwise text may follow one. number: that of the row's first line."""
        rest, blanks = rf"[^{re.escape(self._layout.separator)}\r\n]*", " *" * self._layout.has_blanks
        quoted, plain, at = re.compile(rf'{blanks}"((?:[^"]++|"")*+)"({rest})'), re.compile(rest), 0
        opening = re.compile(f'{blanks}"')
        while at < len(row):
            found = (quoted if opening.match(row, at) else plain).match(row, at)
            if not found or (found.re is quoted and found[2].strip() and _LINE_END.search(found[1])):
                line = number + len(_LINE_END.findall(row[:at]))
                self.defect = f"the quote opened in line {line:,} is not closed"
                raise _UnfitError(
                    f"{self._opened.place}: {self.defect}, so the lines below would become part of its text. Close it, "
                    'and inside quoted text double every quote (not \\"); or pass --quoting none if quotes belong to '
                    "the texts"
                )
            at = found.end() + 1


def _layout(opened: SourceFile, wanted: dict[str, str], separator: str | None, quoting: Quoting | None) -> _Layout:
    """Read the first line. wanted: option that names a column -> its name.

    Raises SourceError if a column is missing or occurs twice.
    """
    file, skipped = opened.place, 0
    is_utf16 = opened.read(0, 2) in (b"\xff\xfe", b"\xfe\xff")
    encoding = ("utf-16", "backslashreplace") if is_utf16 else ("utf-8-sig", "surrogateescape")
    text = io.TextIOWrapper(opened.reader(), encoding[0], "backslashreplace", newline="")
    first = text.readline(MAX_ROW_BYTES)
    if said := re.fullmatch(r"(?i)sep=(.)[\r\n]*", first):  # which Excel writes and reads
        separator, skipped, first = separator or said[1], 1, text.readline(MAX_ROW_BYTES)
    separator = separator or ("\t" if file.name.lower().endswith(".tsv") or "\t" in first else ",")
    if len(separator.encode()) != 1:
        raise SourceError(f"the separator {separator!r} is not one ASCII character")

    style: Literal[0, 3] = csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL

    def split(separator: str) -> list[str]:
        return next(csv.reader([first], delimiter=separator, quoting=style, skipinitialspace=True), [])

    try:
        header = [name.strip() for name in split(separator)]
    except csv.Error as error:
        raise SourceError(f"{file} does not begin with column names: {error}") from error
    for option, name in wanted.items():
        if header.count(name) != 1:
            others = [each for each in "\t,;|" if {*wanted.values()} <= {*map(str.strip, split(each))}]
            raise SourceError(f"{file} {_missing(header, option, name, first, others)}")
    names = first.rstrip("\r\n").split(separator)
    quoted = quoting != "none" and any(each.strip()[:1] == '"' for each in names)
    return _Layout(header, separator, encoding, skipped, any(each != each.strip() for each in names), quoted)


def _missing(header: list[str], option: str, name: str, first: str, others: Sequence[str]) -> str:
    """Return why the header lacks a column, and what to do. others: separators with which it has all."""
    if first.startswith("\x1f"):
        return "is compressed by gzip; unpack it first, with gunzip"
    if "\0" in first:
        return "is not text in UTF-8: its first line has zero bytes. Save the list as csv or tsv in UTF-8"
    if first.lstrip()[:1] in ("{", "["):
        return (
            "is JSON. Karpathy's is read by `thermopile convert karpathy`; of other JSON write a csv first, by "
            "python -c 'import pandas; "
            'pandas.read_json("FILE", lines=True).to_csv("list.csv", index=False)\''
        )
    if others and name not in header:
        return f"has column {name!r} if separated otherwise: pass --separator {others[0]!r}".replace("'\\t'", "$'\\t'")
    if data := [each for each in header if _PICTURE.search(each)]:
        web = " Its pictures are on the web: download them with img2dataset first." * ("://" in data[0])
        return (
            f"seems to have no header: its first line holds {data[0][:100]!r}. Put a line with the columns' names "
            f"above it, separated as the rows are, and give the names with --image and --caption.{web}"
        )
    there = ", ".join(repr(column) for column in header[:50]) or "none"
    said = "no column" if name not in header else "more than one column"
    return f"has {said} {name!r}; its columns, by its first line: {there}. Name the right one with --{option}"
