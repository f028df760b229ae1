"""The dataset on disk, written by a conversion and read by every loader. See docs/formats.md."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..files import sha256_of
from .dataset_index import INDEX_FILE, SHARD_FOLDER, SHARD_SUFFIXES, TOKENIZER_FILE, read_index, shard_name
from .errors import DatasetError
from .samples_table import SamplesTable

if TYPE_CHECKING:
    from .descriptor import Descriptor
    from .shard import OpenShards, Shard

_log = logging.getLogger(__name__)
_told: set[str] = set()
"""Datasets of format 1 that this process has warned about."""


class Dataset:
    """A converted dataset, opened for reading.

    Raises DatasetError if the directory is not a dataset, is incomplete, or has an unknown format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.index = read_index(self.path)
        self.first_id = np.array(self.index.first_id, np.int64)
        self._refuse_missing_files()
        self._table = SamplesTable(self.path, self.index)
        if self.index.format == 1 and (name := os.path.realpath(self.path)) not in _told:
            _told.add(name)
            _log.warning("%s has format 1, which has no checksums: its samples are not verified. "
                         "Convert it again to verify them.", self.path)  # fmt: skip

    def _refuse_missing_files(self) -> None:
        folder = self.path / SHARD_FOLDER
        suffixes = [suffix for suffix in SHARD_SUFFIXES if self.index.format > 1 or suffix != "rows"]
        try:
            there = set(os.listdir(folder))  # one listing, however many shards there are
        except OSError as error:
            raise DatasetError(f"{folder} cannot be read: {error.strerror}. Convert the dataset again.") from error
        for shard in range(self.shards):
            for suffix in suffixes:
                if (name := shard_name(shard, suffix)) not in there:
                    raise DatasetError(
                        f"{folder / name} is missing, but {INDEX_FILE} lists it. Convert the dataset again."
                    )

    @property
    def n(self) -> int:
        return self.index.n

    @property
    def shards(self) -> int:
        return len(self.first_id) - 1

    @cached_property
    def tokenizer_path(self) -> Path:
        """Path of tokenizer.json, after comparing its digest. Raises DatasetError if the file has changed."""
        path = self.path / TOKENIZER_FILE
        try:
            if self.index.tokenizer_digest not in (None, sha256_of(path)):
                raise DatasetError(f"{path} was changed after conversion: its sha256 differs from the one in "
                                   f"{INDEX_FILE}. Convert the dataset again.")  # fmt: skip
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error}. Convert the dataset again.") from error
        return path

    def locate(self, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return shard and row of each id, both int64 [b]. Raises DatasetError for an id out of range."""
        if len(sample_ids) and (sample_ids.min() < 0 or sample_ids.max() >= self.n):
            raise DatasetError(
                f"sample ids {sample_ids.min()} to {sample_ids.max()} are out of range: {self.path} "
                f"holds 0 to {self.n - 1}"
            )
        shard = np.searchsorted(self.first_id, sample_ids, side="right") - 1
        return shard, sample_ids - self.first_id[shard]

    @cached_property
    def _open_shards(self) -> OpenShards:
        from .shard import OpenShards, Shard  # importing numba takes half a second, and the index does not need it

        return OpenShards(self.index, lambda number: Shard(self.path, self.index, number))

    def shard(self, number: int) -> Shard:
        """Return a shard's pixels and tokens; it stays open as long as the caller keeps it.

        Raises DatasetError if it was cut short or belongs to another dataset, OSError if it cannot be opened.
        """
        return self._open_shards[number]

    def beton(self, number: int) -> Descriptor:
        """Return a shard's .beton for `pread`, open as long as the caller keeps it. Raises DatasetError, OSError."""
        from .shard import open_beton

        shard = self._open_shards.get(number)
        return shard.file if shard else open_beton(self.path, number)

    def jpeg(self, sample_id: int) -> bytes:
        """Return the stored JPEG of one sample.

        Raises DatasetError for an id out of range or a damaged shard, OSError if the shard cannot be read.
        """
        shard, row = (int(place[0]) for place in self.locate(np.array([sample_id], np.int64)))
        return self.shard(shard).jpeg(row)

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the samples table's columns, from its first shard. Raises DatasetError."""
        return self._table.schema

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one column of the samples table for all n samples, ordered by id. Raises DatasetError."""
        return pa.chunked_array(
            [chunk for shard in range(self.shards) for chunk in self._table.whole(shard, [name])[name].chunks]
        )

    def tables(self, names: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Yield columns of the samples table, ordered by id, in tables of `rows` rows; the last may have fewer.

        Raises DatasetError if a column or a row is missing, or a file is damaged.
        """
        return self._table.pieces(names, rows)

    def take(self, sample_ids: NDArray[np.int64], names: Sequence[str]) -> pa.Table:
        """Return columns of the samples table for ids, int64 [b], in the given order; reads only their shards.

        Raises DatasetError for an id out of range, a missing column or row, or a damaged file.
        """
        return self._table.take(*self.locate(sample_ids), names)

    def rows(self, sample_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples table's rows of a few ids, in the given order, each with its `sample_id`.

        Raises DatasetError as `take` does.
        """
        table = self.take(np.array(sample_ids, np.int64), self.schema.names)
        return [{"sample_id": int(id), **row} for id, row in zip(sample_ids, table.to_pylist(), strict=True)]
