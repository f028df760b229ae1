"""One shard of a dataset, opened for reading."""

import resource
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from .dataset_index import SHARD_FOLDER, DatasetIndex
from .errors import DatasetError
from .raw_bytes import Descriptor
from .row_records import RECORD, Extent, RowRecords
from .stored_sample import REASONS, SOUND, Located, read_samples, read_tokens

_CURE = "Convert the dataset again."
_MAX_FILES = 8192
"""Raise the process's limit of open files to this, within its hard limit."""


class Shard:
    """Reads samples of one shard. Its files close when it is garbage-collected."""

    def __init__(self, path: Path, index: DatasetIndex, number: int, place: object = None) -> None:
        """Open shard `number` of the dataset in the folder `path`. place: its name in errors; None: the folder.

        Raises DatasetError if the shard was cut short or belongs to another dataset, OSError if it cannot be opened.
        """
        self._path, self._number, self._first_id = place or path, number, index.first_id[number]
        self._rows = index.first_id[number + 1] - self._first_id
        self._tokenizer = index.tokenizer
        context_length = index.tokenizer.context_length if index.tokenizer else 0
        self.file = open_beton(path, index, number)
        extent = Extent(self.file.bytes, 4 * context_length, index.captions_per_sample)
        try:
            self._table = RowRecords(path / SHARD_FOLDER / index.shard_name(number, "rows"), self._rows, extent)
        except DatasetError as error:
            raise DatasetError(f"{error}. {_CURE}") from None
        except FileNotFoundError as error:
            raise _missing(error) from None

    def __len__(self) -> int:
        return self._rows

    def records(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.void]:
        """Return RECORD of these rows, int64 [k], or of all. Raises DatasetError naming the first damaged row."""
        rows = np.arange(self._rows) if rows is None else rows
        records = np.empty(len(rows), RECORD)
        if (place := self._table.read(rows, records)) < len(rows):
            raise self.damaged(int(rows[place]), "has a damaged or unreadable record")
        return records

    def located(self, records: NDArray[np.void]) -> Located:
        """Return the places that RECORD [k] point to, in this shard's file; with captions, tokens are read too."""
        info = self._tokenizer
        vocab_size, context_length = (info.vocab_size, info.context_length) if info else (0, 0)
        return Located.of(records, file=self.file.number, vocab_size=vocab_size, context_length=context_length)

    def jpeg(self, row: int) -> bytes:
        """Return the JPEG of a row. Raises DatasetError if it cannot be read or has changed since it was stored."""
        located = Located.of(self.records(np.array([row])), file=self.file.number)
        jpeg = np.empty(located.jpeg_bytes[0], np.uint8)
        _, fault = read_samples(located, 0, 1, located.jpeg_bytes, jpeg)
        if fault != SOUND:
            raise self.damaged(row, REASONS[fault])
        return jpeg.tobytes()

    def tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the first captions' tokens, int32 [len(rows), L]; requires captions. Raises as `jpeg` does."""
        located = self.located(self.records(rows))
        place, fault = read_tokens(located)
        if fault != SOUND:
            raise self.damaged(int(rows[place]), REASONS[fault])
        return located.tokens

    def tokens_of(self, row: int) -> NDArray[np.int32]:
        """Return the tokens of all captions of a row, int32 [captions, L]; requires captions. Raises as `jpeg` does."""
        record = self.records(np.array([row]))
        captions = np.arange(record["captions"][0], dtype=np.int64)
        located = self.located(np.repeat(record, len(captions)))._replace(caption=captions)
        _, fault = read_tokens(located)
        if fault != SOUND:
            raise self.damaged(row, REASONS[fault])
        return located.tokens

    def damaged(self, row: int, what: str) -> DatasetError:
        """Return the error to raise for a row: "sample N" followed by `what`."""
        return DatasetError(
            f"sample {self._first_id + row} (row {row} of shard {self._number} of {self._path}) {what}. {_CURE}"
        )


def open_beton(path: Path, index: DatasetIndex, number: int) -> Descriptor:
    """Open the .beton of shard `number` of the dataset at `path`. Raises DatasetError if it is missing; OSError."""
    try:
        return Descriptor(path / SHARD_FOLDER / index.shard_name(number, "beton"))
    except FileNotFoundError as error:
        raise _missing(error) from None


def _missing(error: FileNotFoundError) -> DatasetError:
    return DatasetError(f"{error.filename} is missing, but the dataset lists it. {_CURE}")


def max_open_shards() -> int:
    """Return how many shards may be open at once: an eighth of the process's limit of open files, which is raised.

    A shard has two files, and loaders hold as many .beton files again, however many shards a batch spans.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(4, allowed // 8)


class OpenShards:
    """Opens shards on demand and keeps the most recently used shards open; thread-safe."""

    def __init__(self, open_one: Callable[[int], Shard]) -> None:
        self._open_one = open_one
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = Lock()
        self._most = max_open_shards()

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
