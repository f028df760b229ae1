"""Open a dataset, local or remote, or a mixture of several: the one place that chooses how their files are read."""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa

from ..storage.arrays import Int64s, Records
from ..storage.bucket_errors import ObjectStoreError
from ..storage.files import RegularFile, sha256_of
from ..storage.local import LocalPath
from ..storage.place import AnyPlace, Place, Places, made_for, place_of, places_of
from .dataset.files import DatasetFiles, TarFiles
from .dataset.index import INDEX_FILE, SHARD_FOLDER, TOKENIZER_FILE, DatasetIndex, read_index
from .dataset.samples_table import PLACE_IN_SHARD, SamplesTable
from .errors import CURE, DatasetError

if TYPE_CHECKING:
    from .dataset.shard import OpenFiles, Shard

LOOKED_AT = 4096
"""Samples whose pictures' sizes are read; ids are in random order."""
SMALLEST, LARGEST, SIDE_STEP = 32, 224, 16
"""Side lengths of views that are chosen, in pixels."""
SHOWN = 6
"""Samples that a notebook shows."""
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


class Dataset(SamplesTable):
    """A converted dataset, opened for reading: its samples table, pictures and tokens.

    A remote dataset's files are fetched on first use. Raises DatasetError if the place is not a dataset, or the
    dataset is incomplete or has an unknown format; OSError if the object store cannot be used.
    """

    tars: TarFiles | None = None
    """The tars that hold the pictures of a dataset in place."""
    appended_since = 0
    """Number of samples that `before` leaves out."""

    def __init__(
        self, place: AnyPlace, tars: AnyPlace | None = None, *, pictures: bool = True, before: Collection[str] = ()
    ) -> None:
        """place: the dataset's folder, or its address, such as s3://bucket/cc12m.

        tars: of a dataset in place, the folder or address of its tars, if they were moved. pictures: if False, none is
        read, and tars may be missing. before: fingerprints, one of which may be the dataset's before samples were
        appended; those are then left out.
        """
        where = place_of(place)
        whole = read_index(where)
        index = whole.before(before)
        self.appended_since = whole.n - index.n
        if tars and index.tars is None:
            raise DatasetError(f"{where} holds its pictures itself; leave out --tars (data.tars)")
        self.tars = TarFiles(index.tars, tars) if index.tars and pictures else None
        super().__init__(where, index, _files_at(where, index, self.tars, lambda number: self._open_shards[number]))
        there = set(self.files.names())
        for name in index.shard_files():
            if name not in there:
                raise DatasetError(f"{where / SHARD_FOLDER / name} is missing, but {INDEX_FILE} lists it. {CURE}")

    def __fspath__(self) -> str:
        return str(self.place)

    def __repr__(self) -> str:
        return f"<Dataset {self.place}: {self.n:,} samples>"

    def _repr_html_(self) -> str:
        """Return the first samples with their pictures, for a notebook."""
        shown = ""
        for sample, row in enumerate(self.take(np.arange(min(self.n, SHOWN)), ["caption", "group"]).to_pylist()):
            uri = f"data:image/jpeg;base64,{b64encode(self.jpeg(sample)).decode()}"
            text = escape((row["caption"] or row["group"] or "")[:200])
            shown += f"<td style='max-width: 8em'><img src='{uri}' style='max-width: 100%'><br><bdi>{text}</bdi></td>"
        return f"<p>{escape(repr(self))}</p><table><tr>{shown}</tr></table>"

    @property
    def path(self) -> Path:
        """The folder of the files; for a remote dataset the cache's, which holds only the files used so far."""
        return self.files.folder

    @property
    def is_remote(self) -> bool:
        return self.place.is_remote

    @cached_property
    def fetches(self) -> bool:
        """Whether samples, or their pictures, are fetched from an object store."""
        return self.files.beton_bytes() is not None

    @property
    def absolute(self) -> str:
        """The place as recorded: an address, or a path without links."""
        return str(self.place.resolve())

    @property
    def name(self) -> str:
        """The last part of the place."""
        return os.path.basename(self.absolute)

    @cached_property
    def tokenizer_path(self) -> Path:
        """Local path of tokenizer.json, after a check of its digest. Raises DatasetError if the file has changed."""
        try:
            path = self.files.whole(TOKENIZER_FILE)
            if self.index.tokenizer_digest not in (None, sha256_of(path)):
                raise DatasetError(
                    f"{path} was changed after conversion: its sha256 differs from that in {INDEX_FILE}. {CURE}"
                )
        except ObjectStoreError:
            raise  # the failure says nothing about the file
        except OSError as error:
            raise DatasetError(f"{self.place / TOKENIZER_FILE} cannot be read: {error}. {CURE}") from error
        return path

    @cached_property
    def _open_shards(self) -> OpenFiles[Shard]:
        from .dataset.shard import OpenFiles, Shard  # numba takes half a second to import, and the index needs none

        return OpenFiles(lambda number: Shard(self.files, self.index, number, self.place, self.file))

    @cached_property
    def _open_tars(self) -> OpenFiles[RegularFile]:
        from .dataset.shard import OpenFiles

        return OpenFiles(lambda number: RegularFile(cast(TarFiles, self.tars).path(number), os.O_NOFOLLOW))

    def shard(self, number: int) -> Shard:
        """Return a shard's pixels and tokens; it stays open as long as the caller keeps it.

        Read only samples that `files` holds. Raises DatasetError if the shard was cut short or belongs to another
        dataset, OSError if it cannot be opened.
        """
        self.files.prepare(number)
        return self._open_shards[number]

    def records(self, number: int) -> Records:
        """Return RECORD of all rows of a shard. Raises DatasetError naming a damaged row, OSError."""
        self.files.bring_records(number)
        return self.shard(number).records()

    def file(self, shard: int, place: int) -> RegularFile:
        """Return the file at one of `Located`'s places, for `pread`, open as long as the caller keeps it.

        Raises DatasetError, OSError.
        """
        from .dataset.shard import open_beton

        if place != -1:
            return self._open_tars[place] if place >= 0 else self.files.opened(place)
        opened = self._open_shards.get(shard)
        return (opened and opened.file) or open_beton(self.path, self.index, shard)

    def jpeg(self, sample_id: int) -> bytes:
        """Return the stored JPEG of one sample.

        Raises DatasetError for an id out of range or a damaged shard, OSError if the shard cannot be read.
        """
        ids = np.array([sample_id], np.int64)
        shard, row = (int(place[0]) for place in self.locate(ids))
        with self.files.hold(ids):
            return self.shard(shard).jpeg(row)


def _files_at(place: Place, index: DatasetIndex, tars: TarFiles | None, opened: Callable[[int], Shard]) -> DatasetFiles:
    if isinstance(place, LocalPath) and not (tars and tars.root.is_remote):
        return DatasetFiles(place)
    from .remote.files import RemoteFiles, RemoteTars  # imports numba

    return made_for(
        place,
        lambda folder: RemoteTars(folder, index, tars, opened),
        lambda address: RemoteFiles(address, index, tars, opened),
    )


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

    def parts_of(self, sample_ids: Int64s) -> dict[str, pa.Array]:
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

    def file(self, shard: int, place: int) -> RegularFile:
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
    sizes = [one.index.tokenizer and one.index.tokenizer.model_copy(update={"truncated": 0}) for one in (first, other)]
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


def shorter_side(dataset: Dataset) -> int:
    """Return the median shorter side of the stored pictures, in pixels. Raises DatasetError, OSError."""
    parts = dataset.parts if isinstance(dataset, Mixture) else (dataset,)
    looked_at = [np.arange(min(part.n, LOOKED_AT // len(parts))) for part in parts]
    sizes = pa.concat_tables(part.take(ids, ["width", "height"]) for part, ids in zip(parts, looked_at, strict=True))
    return int(np.median(np.minimum(sizes["width"].to_numpy(), sizes["height"].to_numpy())))


def usual_image_size(dataset: Dataset) -> int:
    """Return the pictures' median shorter side, rounded down to a multiple of SIDE_STEP, within the limits."""
    return min(LARGEST, max(SMALLEST, shorter_side(dataset) // SIDE_STEP * SIDE_STEP))
