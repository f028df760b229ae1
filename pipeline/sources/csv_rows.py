"""The rows of a csv or tsv file by number, in memory independent of their texts' length: the file is the listing.

One pass over the file finds the start of every 64th row. A row is then read with its 63 neighbours.
"""

import csv
import hashlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SourceChangedError, SourceError
from ..rng import compiled
from .source_file import SourceFile

STRIDE = 64
"""Rows read together."""
MAX_MALFORMED = 10_000
"""Limit of rows with a wrong number of columns; beyond it the separator must be wrong."""
MAX_ROW_BYTES = 16 << 20
PIECE_BYTES = 16 << 20
"""Bytes scanned at once."""

# State of the scan between two pieces of the file: an int64 each.
_MODE, _COLUMNS, _ROW_AT, _ROWS, _GOOD, _AFTER_CR, _LINE, _QUOTE_LINE, _SPANS, _MALFORMED, _FAULT, _WHERE = range(12)
_FIELD_START, _PLAIN, _QUOTED, _CLOSED = range(4)
_NO_FAULT, _UNCLOSED_QUOTE, _LONG_ROW, _MANY_MALFORMED = range(4)


class CsvRows:
    """The rows below the header, numbered from 0, except rows with a wrong number of columns.

    columns: number of columns of the header. wanted: places of the columns to return.
    Raises SourceError if a quote is never closed, a row exceeds MAX_ROW_BYTES, or too many rows are malformed.
    """

    def __init__(self, file: SourceFile, separator: str, columns: int, wanted: tuple[int, ...]) -> None:
        self._file, self._separator, self._columns, self._wanted = file, separator, columns, wanted
        scan = _Scan(file, separator, columns)
        self.malformed = scan.malformed()
        """A message for each malformed row."""
        self.digest = scan.digest
        """sha256 of the file."""
        self._count, self._starts = int(scan.state[_GOOD]), scan.starts
        self._kept: tuple[int, list[tuple[bytes, ...]]] = (-1, [])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> tuple[bytes, ...]:
        """Return the wanted columns of a row. Raises SourceError if the file has changed since it was listed."""
        block = row // STRIDE
        if self._kept[0] != block:
            self._kept = block, self._read(block)
        return self._kept[1][row % STRIDE]

    def __iter__(self) -> Iterator[tuple[bytes, ...]]:
        for block in range(len(self._starts) - 1):
            yield from self._read(block)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_kept": (-1, [])}

    def _read(self, block: int) -> list[tuple[bytes, ...]]:
        start, end = self._starts[block : block + 2].tolist()
        data = self._file.read(start, end - start)
        text = io.StringIO(data.decode("utf-8", "surrogateescape"), newline="")
        limit = csv.field_size_limit(MAX_ROW_BYTES)
        try:
            rows = [row for row in csv.reader(text, delimiter=self._separator) if len(row) == self._columns]
        finally:
            csv.field_size_limit(limit)
        if len(rows) != min(STRIDE, self._count - block * STRIDE):
            raise SourceChangedError(self._file.place)
        return [tuple(row[place].encode("utf-8", "surrogateescape") for place in self._wanted) for row in rows]


class _Scan:
    """One pass over a file."""

    def __init__(self, file: SourceFile, separator: str, columns: int) -> None:
        self._file, self._columns = file.place, columns
        self.state = np.zeros(12, np.int64)
        self.state[[_LINE, _MODE]] = 1, _FIELD_START
        self._malformed = np.empty((MAX_MALFORMED + 1, 2), np.int64)
        self._separator, starts, digest = ord(separator), [np.empty(0, np.int64)], hashlib.sha256()
        with ThreadPoolExecutor(1) as beside:
            at = 0
            while data := file.read(at, PIECE_BYTES):
                digesting = beside.submit(digest.update, data)
                starts.append(self._scan(np.frombuffer(data, np.uint8), at))
                digesting.result()
                at += len(data)
        starts += [self._scan(np.frombuffer(b"\n", np.uint8), at), np.array([at])]  # ends the last row
        if self.state[_MODE] == _QUOTED:
            self._refuse(_UNCLOSED_QUOTE)
        self.starts, self.digest = np.concatenate(starts), digest.hexdigest()

    def malformed(self) -> list[str]:
        return [
            f"row {row} of the file, counting the header as row 1, has {columns} columns, "
            f"the header has {self._columns}"
            for row, columns in self._malformed[: self.state[_MALFORMED]].tolist()
        ]

    def _scan(self, piece: NDArray[np.uint8], at: int) -> NDArray[np.int64]:
        starts = np.empty(len(piece) // (2 * STRIDE) + 2, np.int64)
        skip = 3 if at == 0 and piece[:3].tobytes() == b"\xef\xbb\xbf" else 0
        self.state[_ROW_AT] = max(self.state[_ROW_AT], skip)
        found = _scan(piece[skip:], at + skip, self._separator, self._columns, self.state, starts, self._malformed)
        if self.state[_FAULT]:
            self._refuse(int(self.state[_FAULT]))
        return starts[:found]

    def _refuse(self, fault: int) -> None:
        if fault == _UNCLOSED_QUOTE:
            raise SourceError(
                f"{self._file}: the quote opened in line {self.state[_QUOTE_LINE]:,} is not closed, so "
                "the lines below would become part of its text. Close it; inside quoted text, double "
                "every quote"
            )
        if fault == _LONG_ROW:
            raise SourceError(
                f"{self._file}: row {self.state[_ROWS] + 1:,} has more than {MAX_ROW_BYTES:,} bytes; shorten it"
            )
        raise SourceError(f"{self._file}: over {MAX_MALFORMED:,} malformed rows, the last: {self.malformed()[-1]}")


@compiled
def _scan(
    piece: NDArray[np.uint8],
    at: int,
    separator: int,
    columns: int,
    state: NDArray[np.int64],
    starts: NDArray[np.int64],
    malformed: NDArray[np.int64],
) -> int:
    """Scan a piece that begins at byte `at` of the file; return the number of `starts` filled in.

    A quote opens quoted text only at the start of a field. After its closing quote more text may follow, unless the
    quoted text spans lines: then the quote was most likely never closed.
    """
    found, mode = 0, state[_MODE]
    for i in range(len(piece)):
        byte = piece[i]
        if mode == _PLAIN and byte != separator and byte != 10 and byte != 13:
            continue
        after_cr, state[_AFTER_CR] = state[_AFTER_CR], 0
        state[_LINE] += byte == 10
        if mode == _QUOTED:
            if byte == 34:
                mode = _CLOSED
            elif byte == 10 or byte == 13:
                state[_SPANS] = 1
        elif mode == _FIELD_START and byte == 34:
            mode, state[_QUOTE_LINE], state[_SPANS] = _QUOTED, state[_LINE], 0
        elif mode == _CLOSED and byte == 34:
            mode = _QUOTED
        elif byte == separator:
            mode = _FIELD_START
            state[_COLUMNS] += 1
        elif byte == 10 or byte == 13:
            if byte == 10 and after_cr:
                state[_ROW_AT] = at + i + 1
            else:
                found += _end_row(at + i, columns, state, starts[found:], malformed)
                if state[_FAULT]:
                    return found
            mode = _FIELD_START
            state[_AFTER_CR] = byte == 13
        else:
            if mode == _CLOSED and state[_SPANS]:
                state[_FAULT] = _UNCLOSED_QUOTE
                return found
            mode = _PLAIN
    state[_MODE] = mode
    return found


@compiled
def _end_row(
    end: int, columns: int, state: NDArray[np.int64], starts: NDArray[np.int64], malformed: NDArray[np.int64]
) -> int:
    """Count the row that ends before byte `end`; return 1 if it begins a block, whose start is then filled in."""
    start, its_columns = state[_ROW_AT], state[_COLUMNS] + 1
    state[_ROW_AT], state[_COLUMNS] = end + 1, 0
    if start == end:  # skip empty lines
        return 0
    if end - start > MAX_ROW_BYTES:
        state[_FAULT] = _LONG_ROW
        return 0
    state[_ROWS] += 1
    if state[_ROWS] == 1:  # the header
        return 0
    if its_columns != columns:
        malformed[state[_MALFORMED]] = state[_ROWS], its_columns
        state[_MALFORMED] += 1
        if state[_MALFORMED] == len(malformed):
            state[_FAULT] = _MANY_MALFORMED
        return 0
    state[_GOOD] += 1
    if (state[_GOOD] - 1) % STRIDE:
        return 0
    starts[0] = start
    return 1
