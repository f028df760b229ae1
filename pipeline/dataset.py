"""The dataset on disk: a directory that one conversion writes and every loader reads. docs/formats.md describes it."""

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
"""Datasets of format 1 that were warned of in this process."""


class Dataset:
    """A converted dataset, opened for reading.

    Raises DatasetError where the directory is no dataset, is incomplete, or is of another format.
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
            there = set(os.listdir(folder))  # one question, however many shards there are
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
        """tokenizer.json, compared with its digest. Raises DatasetError where it is not the one that was written."""
        path = self.path / TOKENIZER_FILE
        try:
            if self.index.tokenizer_digest not in (None, sha256_of(path)):
                raise DatasetError(f"{path} was changed after conversion: its sha256 differs from the one in "
                                   f"{INDEX_FILE}. Convert the dataset again.")  # fmt: skip
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error}. Convert the dataset again.") from error
        return path

    def locate(self, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shard and row of each id, int64 [b] both. Raises DatasetError for an id out of range."""
        if len(sample_ids) and (sample_ids.min() < 0 or sample_ids.max() >= self.n):
            raise DatasetError(
                f"sample ids {sample_ids.min()} to {sample_ids.max()} are out of range: {self.path} "
                f"holds 0 to {self.n - 1}"
            )
        shard = np.searchsorted(self.first_id, sample_ids, side="right") - 1
        return shard, sample_ids - self.first_id[shard]

    @cached_property
    def _open_shards(self) -> OpenShards:
        from .shard import OpenShards, Shard  # numba takes half a second to import, and the index needs none of it

        return OpenShards(self.index, lambda number: Shard(self.path, self.index, number))

    def shard(self, number: int) -> Shard:
        """A shard's pixels and tokens; it is open as long as the caller keeps it.

        Raises DatasetError where it was cut short, or is not of this dataset; OSError where it cannot be opened.
        """
        return self._open_shards[number]

    def beton(self, number: int) -> Descriptor:
        """A shard's .beton for `pread`; it is open as long as the caller keeps it. Raises DatasetError, OSError."""
        from .shard import open_beton

        shard = self._open_shards.get(number)
        return shard.file if shard else open_beton(self.path, number)

    def jpeg(self, sample_id: int) -> bytes:
        """The stored JPEG of one sample.

        Raises DatasetError for an id out of range, and where the shard is damaged; OSError where it cannot be read.
        """
        shard, row = (int(place[0]) for place in self.locate(np.array([sample_id], np.int64)))
        return self.shard(shard).jpeg(row)

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the samples table's columns, by its first shard. Raises DatasetError."""
        return self._table.schema

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of the samples table for all n samples, in the order of the ids. Raises DatasetError."""
        return pa.chunked_array(
            [chunk for shard in range(self.shards) for chunk in self._table.whole(shard, [name])[name].chunks]
        )

    def tables(self, names: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Columns of the samples table, so many rows at a time (the last ones fewer), in the order of the ids.

        Raises DatasetError where a column or a row is missing, or a file is damaged.
        """
        return self._table.pieces(names, rows)

    def take(self, sample_ids: NDArray[np.int64], names: Sequence[str]) -> pa.Table:
        """Columns of the samples table for ids, int64 [b], in the order asked; reads the shards that they are in.

        Raises DatasetError for an id out of range, and where a column or a row is missing, or a file is damaged.
        """
        return self._table.take(*self.locate(sample_ids), names)

    def rows(self, sample_ids: Sequence[int]) -> list[dict[str, Any]]:
        """The samples table's rows of a few ids, in the order asked, each with its `sample_id`.

        Raises DatasetError as `take` does.
        """
        table = self.take(np.array(sample_ids, np.int64), self.schema.names)
        return [{"sample_id": int(id), **row} for id, row in zip(sample_ids, table.to_pylist(), strict=True)]
