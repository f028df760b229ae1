"""One shard of a dataset, opened for reading."""

import resource
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

import numpy as np

from ...storage.arrays import Bools, Int32s, Int64s, Records
from ...storage.files import RegularFile
from ..errors import CURE, DatasetError
from .files import DatasetFiles
from .index import SHARD_FOLDER, DatasetIndex
from .row_records import NO_TARS, RECORD, Extent, RowRecords, picture_places
from .stored_sample import REASONS, SOUND, Located, Opener, read_samples, read_tokens

_MAX_FILES = 8192
"""Raise the process's limit of open files to this, within its hard limit."""
T = TypeVar("T")


class Shard:
    """Reads samples of one shard. Its files close when it is garbage-collected."""

    def __init__(self, files: DatasetFiles, index: DatasetIndex, number: int, place: object, open_file: Opener) -> None:
        """Open shard `number` of a dataset. place: its name in errors. open_file: as `Dataset.file`.

        Raises DatasetError if the shard was cut short or belongs to another dataset, OSError if it cannot be opened.
        """
        self._path, self._number, self._first_id = place, number, index.first_id[number]
        self._rows = index.first_id[number + 1] - self._first_id
        self._tokenizer, self._tars, self._files, self._open_file = index.tokenizer, index.tars, files, open_file
        context_length = index.tokenizer.context_length if index.tokenizer else 0
        size = files.beton_size(number)
        self.file = open_beton(files.folder, index, number) if size is None else None
        """The .beton, if it is on disk."""
        size = self.file.size if self.file else size or 0
        tars = index.tars.bytes if index.tars else NO_TARS
        extent = Extent(size, 4 * context_length, index.captions_per_sample, tars)
        try:
            self._table = RowRecords(files.folder / SHARD_FOLDER / index.shard_name(number, "rows"), self._rows, extent)
        except DatasetError as error:
            raise DatasetError(f"{error}. {CURE}") from None
        except FileNotFoundError as error:
            raise _missing(error) from None

    def __len__(self) -> int:
        return self._rows

    def records(self, rows: Int64s | None = None) -> Records:
        """Return RECORD of these rows, int64 [k], or of all. Raises DatasetError naming the first damaged row."""
        rows = np.arange(self._rows) if rows is None else rows
        records = np.empty(len(rows), RECORD)
        if (place := self._table.read(rows, records)) < len(rows):
            raise self.damaged(int(rows[place]), "has a damaged or unreadable record")
        return records

    def resolved(self, rows: Int64s) -> tuple[Records, Int64s]:
        """Return RECORD as `records`, but `jpeg_at` in the picture's file; and its tar, int64 [k], -1: the .beton."""
        records = self.records(rows)
        tars, records["jpeg_at"] = picture_places(records, self._tars is not None)
        return records, tars

    def located(self, records: Records, tars: Int64s | None = None) -> Located:
        """Return the places of what `resolved` returns, or of tokens alone; with captions, tokens are read too."""
        info = self._tokenizer
        vocab_size, context_length = (info.vocab_size, info.context_length) if info else (0, 0)
        return Located.of(records, tars, vocab_size=vocab_size, context_length=context_length)

    def opened(self, located: Located, rows: Int64s) -> tuple[Located, list[RegularFile]]:
        """Return places of held rows, int64 [k], with descriptors of files, and these files to keep."""
        ids = self._first_id + rows
        located = self._files.placed(located, ids, ids)
        return located, located.open([self._number] * len(rows), self._open_file)

    def jpeg(self, row: int) -> bytes:
        """Return the JPEG of a row. Raises DatasetError if it cannot be read or has changed since it was stored."""
        rows = np.array([row])
        located, _files = self.opened(Located.of(*self.resolved(rows)), rows)
        jpeg = np.empty(located.jpeg_bytes[0], np.uint8)
        _, fault = read_samples(located, 0, 1, located.jpeg_bytes, jpeg)
        if fault != SOUND:
            raise self.damaged(row, REASONS[fault])
        return jpeg.tobytes()

    def tokens(self, rows: Int64s) -> Int32s:
        """Return the first captions' tokens, int32 [len(rows), L]; requires captions. Raises as `jpeg` does."""
        return self._tokens(self.located(self.records(rows)), rows)

    def tokens_of(self, row: int) -> Int32s:
        """Return the tokens of all captions of a row, int32 [captions, L]; requires captions. Raises as `jpeg` does."""
        record = self.records(np.array([row]))
        captions = np.arange(record["captions"][0], dtype=np.int64)
        located = self.located(np.repeat(record, len(captions)))._replace(caption=captions)
        return self._tokens(located, np.full(len(captions), row))

    def _tokens(self, located: Located, rows: Int64s) -> Int32s:
        located, _files = self.opened(located, rows)
        place, fault = read_tokens(located)
        if fault != SOUND:
            raise self.damaged(int(rows[place]), REASONS[fault])
        return located.tokens

    def captions_differ(self, rows: Int64s, others: Int64s) -> Bools:
        """Return where two rows, int64 [k] each, have no caption in common, bool [k]. Raises as `jpeg` does."""
        one, two = self.records(rows), self.records(others)
        if max(*one["captions"], *two["captions"]) == 1:
            return np.asarray(one["tokens_checksum"] != two["tokens_checksum"])
        own, theirs = ([{*map(bytes, self.tokens_of(row))} for row in each.tolist()] for each in (rows, others))
        return np.array([a.isdisjoint(b) for a, b in zip(own, theirs, strict=True)])

    def damaged(self, row: int, what: str) -> DatasetError:
        """Return the error to raise for a row: "sample N" followed by `what`."""
        record, where = np.empty(1, RECORD), f"row {row} of shard {self._number} of {self._path}"
        if self._tars is not None and self._table.read(np.array([row]), record) == 1:
            tar = int(picture_places(record, in_place=True)[0][0])
            where += f", picture in {self._tars.files[tar].name}" if tar >= 0 else ""
        return DatasetError(f"sample {self._first_id + row} ({where}) {what}. {CURE}")


def open_beton(path: Path, index: DatasetIndex, number: int) -> RegularFile:
    """Open the .beton of shard `number` of the dataset at `path`. Raises DatasetError if it is missing; OSError."""
    try:
        return RegularFile(path / SHARD_FOLDER / index.shard_name(number, "beton"))
    except FileNotFoundError as error:
        raise _missing(error) from None


def _missing(error: FileNotFoundError) -> DatasetError:
    return DatasetError(f"{error.filename} is missing, but the dataset lists it. {CURE}")


def max_open_shards() -> int:
    """Return how many shards may be open at once: an eighth of the process's limit of open files, which is raised.

    A shard has two files, and loaders hold as many .beton files again, however many shards a batch spans. Of a dataset
    in place, as many tars may be open, and held by loaders.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(4, allowed // 8)


class OpenFiles(Generic[T]):
    """Opens shards, or tars, on demand and keeps the most recently used of them open; thread-safe."""

    def __init__(self, open_one: Callable[[int], T]) -> None:
        self._open_one = open_one
        self._open: OrderedDict[int, T] = OrderedDict()
        self._lock = Lock()
        self._most = max_open_shards()

    def __getitem__(self, number: int) -> T:
        """Return shard or tar `number`, which stays open as long as the caller keeps it."""
        with self._lock:
            if number not in self._open:
                opened = self._open_one(number)
                while len(self._open) >= self._most:
                    self._open.popitem(last=False)
                self._open[number] = opened
            self._open.move_to_end(number)
            return self._open[number]

    def forget(self, number: int) -> None:
        """Close shard or tar `number`, unless a caller keeps it."""
        with self._lock:
            self._open.pop(number, None)

    def get(self, number: int) -> T | None:
        """Return shard or tar `number` if it is open."""
        with self._lock:
            return self._open.get(number)
