"""A converted dataset as a source of stored JPEGs, captions and tables, to write a smaller dataset."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from ...storage.arrays import Int64s
from ...storage.place import Place
from ..dataset.samples_table import CAPTIONS
from ..errors import BadSampleError, DatasetError, SourceError
from ..opening import Dataset
from . import ClassGroups, Sample, Source
from .listing import groups_by_name, resolved_text, says_nothing_about_the_file


class DatasetSource(Source):
    """The samples of a dataset, whose indices are their ids. Raises SourceError if the directory is not a dataset.

    A worker reopens the dataset on first use, and holds the samples table of one shard: see chunks().
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        try:
            self.mode = self.dataset.index.mode
        except (DatasetError, OSError) as error:
            raise SourceError(str(error)) from error
        self._table: tuple[int, pa.Table] | None = None

    @cached_property
    def dataset(self) -> Dataset:
        return Dataset(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "mode": self.mode, "_table": None}

    def __len__(self) -> int:
        return self.dataset.n

    def __getitem__(self, index: int) -> Sample:
        try:
            row, jpeg = self._row(index), self.dataset.jpeg(index)
        except (DatasetError, OSError) as error:
            if says_nothing_about_the_file(error):
                raise
            raise BadSampleError(str(error)) from error
        caption, *others = row[CAPTIONS] if row[CAPTIONS] else (None,)
        return Sample(row["uri"], row["key"], jpeg, caption, row["group"], tuple(others))

    def sample(self, index: int, unchanged_since: int) -> Sample:
        return self[index]  # as it is

    def uri(self, index: int) -> str:
        return str(self._row(index)["uri"])

    def key(self, index: int) -> str:
        return str(self._row(index)["key"])

    def groups(self) -> ClassGroups | None:
        chunks = self.dataset.column("group").chunks
        return groups_by_name(chunk.fill_null("").cast(pa.large_binary()) for chunk in chunks)

    def captions(self, indices: Int64s) -> Iterable[str]:
        for index in indices.tolist():
            yield from self._row(index)[CAPTIONS] or ()

    def chunks(self) -> Int64s:
        return self.dataset.first_id

    def stored_bytes(self) -> int | None:
        # From a few pictures: files are padded to pages of 2 MiB, and reading each size takes 64 bytes a sample.
        ids = np.unique(np.linspace(0, self.dataset.n - 1, 100).astype(np.int64))
        try:
            return int(np.mean([len(self.dataset.jpeg(int(id))) for id in ids]) * self.dataset.n)
        except (DatasetError, OSError):
            return None

    def describe(self) -> dict[str, Any]:
        return {"kind": "dataset", "root": resolved_text(self.path), "listing": self.dataset.index.fingerprint}

    def _row(self, index: int) -> dict[str, Any]:
        """Return uri, key, group and captions, a list, of one sample."""
        shard, row = (int(place[0]) for place in self.dataset.locate(np.array([index], np.int64)))
        if self._table is None or self._table[0] != shard:
            self._table = shard, self.dataset.table_of(shard, ["uri", "key", "group", CAPTIONS])
        return dict(self._table[1].slice(row, 1).to_pylist()[0])
