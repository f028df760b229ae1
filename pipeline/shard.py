"""One shard of a dataset, opened for reading, in any format."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .dataset_index import SHARD_FOLDER, DatasetIndex, shard_name
from .descriptor import Descriptor
from .errors import DatasetError
from .ffcv_table import FFCVTable
from .row_records import RECORD, Extent, RowRecords
from .stored_sample import REASONS, read_jpeg, read_tokens

_CURE = "Convert the dataset again."
_MAX_TABLES = 128
"""Shards of format 1 kept open: their tables take 36 bytes for each of up to 131,072 rows."""


_MAX_FILES = 8192
"""Raise the process's limit of open files to this, within its hard limit."""


class _Rows(Protocol):
    """Locates the rows of a shard: RowRecords or FFCVTable."""

    verified: bool

    def read(self, rows: NDArray[np.int64], records: NDArray[np.void]) -> int: ...


class Shard:
    """Reads samples of one shard. Its files close when nothing refers to it."""

    def __init__(self, path: Path, index: DatasetIndex, number: int) -> None:
        """Open shard `number` of the dataset at `path`.

        Raises DatasetError if it was cut short or belongs to another dataset, OSError if it cannot be opened.
        """
        self._path, self._number, self._first_id = path, number, index.first_id[number]
        self._rows = index.first_id[number + 1] - self._first_id
        self.vocab_size = index.tokenizer.vocab_size if index.tokenizer else 0
        self._context_length = index.tokenizer.context_length if index.tokenizer else 0
        self.file = open_beton(path, number)
        beton = path / SHARD_FOLDER / shard_name(number, "beton")
        try:
            extent = Extent(self.file.bytes, 4 * self._context_length, index.captions_per_sample)
            self._records: _Rows
            if index.format == 1:
                self._records = FFCVTable(beton, self.file, self._rows, extent)
            else:
                self._records = RowRecords(path / SHARD_FOLDER / shard_name(number, "rows"), self._rows, extent)
        except DatasetError as error:
            raise DatasetError(f"{error}. {_CURE}") from None
        except FileNotFoundError as error:
            raise _missing(error) from None

    def __len__(self) -> int:
        return self._rows

    @property
    def verified(self) -> bool:
        """Whether samples have checksums to verify."""
        return self._records.verified

    def read_records(self, rows: NDArray[np.int64], records: NDArray[np.void]) -> None:
        """Fill RECORD [k] for these rows, int64 [k], and check it. Raises DatasetError naming the first damaged row."""
        if (place := self._records.read(rows, records)) < len(rows):
            raise self.damaged(int(rows[place]), "has a damaged or unreadable record")

    def records(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.void]:
        """Return RECORD of these rows, int64 [k], or of all. Raises DatasetError naming the first damaged row."""
        rows = np.arange(self._rows) if rows is None else rows
        records = np.empty(len(rows), RECORD)
        self.read_records(rows, records)
        return records

    def jpeg(self, row: int) -> bytes:
        """Return the JPEG of a row. Raises DatasetError if it cannot be read or has changed since it was stored."""
        (record,) = self.records(np.array([row]))
        jpeg = np.empty(record["jpeg_bytes"], np.uint8)
        fault = read_jpeg(
            self.file.number, record["jpeg_at"], record["height"], record["width"], record["jpeg_checksum"],
            self.verified, jpeg,
        )  # fmt: skip
        if fault:
            raise self.damaged(row, REASONS[fault])
        return jpeg.tobytes()

    def tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the first captions' tokens, int32 [len(rows), L]; requires captions. Raises as `jpeg` does."""
        tokens = np.empty((len(rows), self._context_length), np.int32)
        for row, record, into in zip(rows.tolist(), self.records(rows), tokens, strict=True):
            fault = read_tokens(
                self.file.number, record["tokens_at"], record["captions"], record["tokens_checksum"], self.verified,
                self.vocab_size, into,
            )  # fmt: skip
            if fault:
                raise self.damaged(row, REASONS[fault])
        return tokens

    def damaged(self, row: int, what: str) -> DatasetError:
        """Return the error to raise for a row: "sample N" followed by `what`."""
        return DatasetError(f"sample {self._first_id + row} (row {row} of shard {self._number} of {self._path}) "
                            f"{what}. {_CURE}")  # fmt: skip


def open_beton(path: Path, number: int) -> Descriptor:
    """Open the .beton of shard `number` of the dataset at `path`. Raises DatasetError if it is missing; OSError."""
    try:
        return Descriptor(path / SHARD_FOLDER / shard_name(number, "beton"))
    except FileNotFoundError as error:
        raise _missing(error) from None


def _missing(error: FileNotFoundError) -> DatasetError:
    return DatasetError(f"{error.filename} is missing, but the dataset lists it. {_CURE}")


def max_open_shards() -> int:
    """Return how many shards may be open at once: an eighth of the process's limit of open files.

    A shard has two files, and loaders hold as many .beton files again, however many shards a batch spans.
    """
    return max(4, _allowed_files() // 8)


def _allowed_files() -> int:
    """Raise this process's limit of open files as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class OpenShards:
    """Opens shards on demand and keeps the most recently used ones open; thread-safe."""

    def __init__(self, index: DatasetIndex, open_one: Callable[[int], Shard]) -> None:
        self._open_one = open_one
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = Lock()
        self._most = max_open_shards() if index.format > 1 else min(max_open_shards(), _MAX_TABLES)

    def __getitem__(self, number: int) -> Shard:
        """Return shard `number`, which stays open as long as the caller keeps it."""
        with self._lock:
            if number not in self._open:
                shard = self._open_one(number)
                while len(self._open) >= self._most:
                    self._open.popitem(last=False)
                self._open[number] = shard
            self._open.move_to_end(number)
            return self._open[number]

    def get(self, number: int) -> Shard | None:
        """Return shard `number` if it is open."""
        with self._lock:
            return self._open.get(number)
