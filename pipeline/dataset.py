"""The dataset on disk, written by a conversion and read by every loader. See docs/formats.md."""

from __future__ import annotations

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..files import sha256_of
from .dataset_index import INDEX_FILE, SHARD_FOLDER, SHARD_SUFFIXES, TOKENIZER_FILE, read_index, shard_name
from .errors import DatasetError
from .samples_table import SamplesTable

if TYPE_CHECKING:
    from .raw_bytes import Descriptor
    from .shard import OpenShards, Shard

_log = logging.getLogger(__name__)
_told: set[str] = set()
"""Datasets of format 1 that this process has warned about."""


class Dataset(SamplesTable):
    """A converted dataset, opened for reading: its samples table, pictures and tokens.

    Raises DatasetError if the directory is not a dataset, is incomplete, or has an unknown format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(Path(path), read_index(Path(path)))
        self._refuse_missing_files()
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
        for name in (shard_name(shard, suffix) for shard in range(self.shards) for suffix in suffixes):
            if name not in there:
                raise DatasetError(f"{folder / name} is missing, but {INDEX_FILE} lists it. Convert the dataset again.")

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
