"""Several datasets as one: their shards and their ids one after another."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..storage.local import LocalPath
from ..storage.place import AnyPlace, Places, places_of
from .dataset import PLACE_IN_SHARD, Dataset, SamplesTable
from .dataset_index import DatasetIndex, read_index
from .errors import DatasetError

if TYPE_CHECKING:
    from .raw_bytes import Descriptor
    from .shard import Shard

PART, ID_IN_PART = "part", "id_in_part"
"""Columns of the samples table: the name of the sample's part, and its id there."""


def open_dataset(
    places: Places, tars: AnyPlace | None = None, *, pictures: bool = True, before: Collection[str] = ()
) -> Dataset:
    """Open the dataset at a place, or the mixture of those at several. Raises as `Dataset` and `Mixture`.

    tars, pictures, before: as for Dataset.
    """
    parts = [*places_of(places)]
    if len(parts) == 1:
        return Dataset(parts[0], tars, pictures=pictures, before=before)
    if tars:
        raise DatasetError("--tars (data.tars) is for one dataset, not for a mixture; leave it out")
    return Mixture([Dataset(part, pictures=pictures, before=before) for part in parts])


def opened(place: AnyPlace, tars: AnyPlace | None) -> Dataset:
    """Open a dataset; if it is in place, its tars are now at `tars`. Raises as `Dataset`."""
    return Dataset(place, tars if tars and read_index(place).tars else None)


def part_names(paths: Sequence[str]) -> list[str]:
    """Return the folders' names, made distinct by numbers."""
    names: list[str] = []
    for base in map(os.path.basename, paths):
        again = (f"{base}-{number}" for number in range(2, len(paths) + 2))
        names.append(base if base not in names else next(name for name in again if name not in names))
    return names


class Mixture(Dataset):
    """The parts as one dataset. Its table has the columns that all parts have, PART and ID_IN_PART.

    Raises DatasetError, naming both parts, if their modes or tokenizers differ, or for one at an address.
    """

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self.parts, self.appended_since = tuple(parts), sum(part.appended_since for part in parts)
        self.names = part_names([part.absolute for part in parts])
        for part in parts:
            _refuse_unlike(parts[0], part)
        # For messages alone: every file is a part's, and the first part's tokenizer is that of all.
        place = LocalPath(" + ".join(part.absolute for part in parts))
        SamplesTable.__init__(self, place, _joined([part.index for part in parts]), parts[0].files)
        self._first_shard = np.cumsum([0, *(part.shards for part in parts)])

    @property
    def name(self) -> str:
        return " + ".join(self.names)

    def parts_of(self, sample_ids: NDArray[np.int64]) -> dict[str, pa.Array]:
        """Return PART, strings [b], and ID_IN_PART, int64 [b], of these ids."""
        first = self.first_id[self._first_shard[:-1]]
        numbers = np.searchsorted(first, sample_ids, "right") - 1
        names = pa.DictionaryArray.from_arrays(numbers, self.names).dictionary_decode()
        return {PART: names, ID_IN_PART: pa.array(sample_ids - first[numbers])}

    @cached_property
    def schema(self) -> pa.Schema:
        kinds = [dict(zip(part.schema.names, part.schema.types, strict=True)) for part in self.parts]
        common = [(name, kind) for name, kind in kinds[0].items() if all(each.get(name) == kind for each in kinds)]
        return pa.schema(dict(common) | {PART: pa.string(), ID_IN_PART: pa.int64()})

    def table_of(self, shard: int, names: Sequence[str]) -> pa.Table:
        part, number = self._at(shard)
        own = self.parts_of(np.arange(*self.first_id[shard : shard + 2]))
        table = part.table_of(number, [*dict.fromkeys(name for name in (*names, PLACE_IN_SHARD) if name not in own)])
        return pa.table(dict(zip(table.column_names, table.columns, strict=True)) | own).select(list(names))

    def _batches(self, shard: int, names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        yield from self.table_of(shard, names).to_batches(rows)

    def shard(self, number: int) -> Shard:
        part, number = self._at(number)
        return part.shard(number)

    def file(self, shard: int, place: int) -> Descriptor:
        part, number = self._at(shard)
        return part.file(number, place)

    def _at(self, shard: int) -> tuple[Dataset, int]:
        number = int(np.searchsorted(self._first_shard, shard, "right")) - 1
        return self.parts[number], shard - int(self._first_shard[number])


def _refuse_unlike(first: Dataset, other: Dataset) -> None:
    both = f"{first.place} and {other.place} cannot be mixed"
    if other.fetches:
        raise DatasetError(f"{other.place} cannot be part of a mixture, because it is at an address; copy it to a disk")
    if first.index.mode != other.index.mode:
        raise DatasetError(f"{both}: the first holds {first.index.mode}, the other {other.index.mode}")
    sizes = [
        each.index.tokenizer and each.index.tokenizer.model_copy(update={"truncated": 0}) for each in (first, other)
    ]
    if (first.index.tokenizer_digest, sizes[0]) != (other.index.tokenizer_digest, sizes[1]):
        raise DatasetError(
            f"{both}: their tokenizers or context lengths differ. Convert the other again with --tokenizer "
            f"{first.place}/tokenizer.json --context-length {sizes[0] and sizes[0].context_length}"
        )


def _joined(parts: Sequence[DatasetIndex]) -> DatasetIndex:
    """Return the index of the parts as one dataset; its fingerprint names theirs, in order."""
    starts = np.cumsum([0, *(part.n for part in parts)]).tolist()
    most, total = max(part.captions_per_sample for part in parts), sum(part.total_captions for part in parts)
    ids = [start + first for start, part in zip(starts, parts, strict=False) for first in part.first_id[:-1]]
    named = json.dumps({"mixture": [part.fingerprint for part in parts]})
    return parts[0].model_copy(
        update={
            "n": starts[-1],
            "captions_per_sample": most,
            "captions": None if total == starts[-1] * most else total,
            "first_id": (*ids, starts[-1]),
            "shard_digests": tuple(digests for part in parts for digests in part.shard_digests),
            "tars": None,
            "grown_from": None,
            "source": {},
            "fingerprint": hashlib.sha256(named.encode()).hexdigest(),
        }
    )
