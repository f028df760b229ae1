"""The dataset on disk, written by a conversion and read by every loader. See docs/formats.md."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..storage.bucket import Address
from ..storage.bucket_errors import ObjectStoreError
from ..storage.files import open_regular, sha256_of
from ..storage.place import AnyPlace, Place, made_for, place_of
from .dataset_files import DatasetFiles, LocalFiles
from .dataset_index import INDEX_FILE, SHARD_FOLDER, TOKENIZER_FILE, DatasetIndex, read_index
from .errors import DatasetError
from .tar_files import TarFiles

if TYPE_CHECKING:
    from .raw_bytes import Descriptor
    from .shard import OpenFiles, Shard

PLACE_IN_SHARD = "row"
"""Column of the row number in the shard."""
CAPTION, CAPTIONS = "caption", "captions"
"""A sample's first caption or null, and the stored list of all captions, which is read only when it is requested."""


class SamplesTable:
    """Human-readable facts about each sample: one Parquet file per shard, possibly untrusted.

    A file's digest is checked when it is first opened. Methods raise DatasetError for an id out of range, a missing
    column or row, or a damaged file.
    """

    def __init__(self, place: Place, index: DatasetIndex, files: DatasetFiles) -> None:
        self.place = place
        """Folder or address of the dataset."""
        self.index, self.files = index, files
        self.first_id = np.array(index.first_id, np.int64)
        self._verified: set[int] = set()

    @property
    def n(self) -> int:
        """Number of samples."""
        return self.index.n

    def __len__(self) -> int:
        return self.n

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.first_id) - 1

    def locate(self, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return shard and row of each id, both int64 [b]."""
        if len(sample_ids) and (sample_ids.min() < 0 or sample_ids.max() >= self.n):
            raise DatasetError(
                f"sample ids {sample_ids.min()} to {sample_ids.max()} are out of range: {self.place} "
                f"holds 0 to {self.n - 1}"
            )
        shard = np.searchsorted(self.first_id, sample_ids, side="right") - 1
        return shard, sample_ids - self.first_id[shard]

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the columns, from the first shard."""
        with self._open(0) as parquet:
            return _seen(parquet.schema_arrow)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one column for all n samples, ordered by id."""
        shards = [self.table_of(shard, [name])[name] for shard in range(self.shards)]
        return pa.chunked_array([chunk for shard in shards for chunk in shard.chunks])

    def tables(self, names: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Yield columns, ordered by id, in tables of `rows` rows; the last may be shorter."""
        pending, held = [], 0
        for shard in range(self.shards):
            for batch in self._batches(shard, names, rows):
                pending.append(batch)
                held += len(batch)
                while held >= rows:
                    table = pa.Table.from_batches(pending)
                    yield table.slice(0, rows)
                    pending, held = table.slice(rows).to_batches(), held - rows
        if held:
            yield pa.Table.from_batches(pending)

    def _batches(self, shard: int, names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield columns of a shard in batches of `rows` rows or fewer."""
        with self._open(shard, names) as parquet:
            for batch in parquet.iter_batches(batch_size=rows, columns=_stored(parquet.schema_arrow, names)):
                batch.validate(full=True)  # above all check that text is UTF-8
                yield _with_first_captions(batch).select(list(names))

    def take(self, sample_ids: NDArray[np.int64], names: Sequence[str]) -> pa.Table:
        """Return columns for ids, int64 [b], in the given order; reads only their shards."""
        shards, rows = self.locate(sample_ids)
        by_shard = np.argsort(shards, kind="stable")
        first_of_shard = np.flatnonzero(np.diff(shards[by_shard], prepend=-1))
        pieces = []
        for places in np.split(by_shard, first_of_shard)[1:]:
            pieces.append(self.table_of(int(shards[places[0]]), names).take(rows[places]))
        table = pa.concat_tables(pieces) if pieces else self.schema.empty_table().select(list(names))
        in_order = bool((np.diff(shards) >= 0).all())  # saves copying the texts again
        return table if in_order else table.take(np.argsort(by_shard, kind="stable"))

    def rows(self, sample_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of a few ids, in the given order, each with its `sample_id`."""
        table = self.take(np.array(sample_ids, np.int64), self.schema.names)
        return [{"sample_id": int(id), **row} for id, row in zip(sample_ids, table.to_pylist(), strict=True)]

    def table_of(self, shard: int, names: Sequence[str]) -> pa.Table:
        """Return columns of all rows of a shard."""
        return pa.Table.from_batches([*self._batches(shard, names, self.n)])

    @contextmanager
    def _open(self, shard: int, names: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
        """Open a shard's part of the table and check that it has these columns and every row."""
        name = f"{SHARD_FOLDER}/{self.index.shard_name(shard, 'parquet')}"
        path = self.place / name
        rows = self.index.first_id[shard + 1] - self.index.first_id[shard]
        try:
            with open_regular(self.files.whole(name)) as file:
                digest = self.index.shard_digests[shard].get("parquet")
                if digest and shard not in self._verified:
                    if hashlib.file_digest(cast(Any, file), "sha256").hexdigest() != digest:
                        raise DatasetError(
                            f"{path} was changed after conversion: its sha256 differs from the one in "
                            f"{INDEX_FILE}. Convert the dataset again."
                        )
                    self._verified.add(shard)
                with pq.ParquetFile(file) as parquet:
                    known = _seen(parquet.schema_arrow).names
                    if missing := [name for name in names if name not in (*known, *parquet.schema_arrow.names)]:
                        raise DatasetError(
                            f"{path} has no column {', '.join(map(repr, missing))}; it has {', '.join(known)}"
                        )
                    if parquet.metadata.num_rows != rows:
                        raise DatasetError(
                            f"{path} holds {parquet.metadata.num_rows:,} rows, but {INDEX_FILE} says "
                            f"{rows:,}. Convert the dataset again."
                        )
                    yield parquet
        except (pa.ArrowException, UnicodeError) as error:
            reason = " ".join(str(error).split())
            raise DatasetError(f"{path} cannot be read: {reason}. Convert the dataset again.") from error


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
        super().__init__(where, index, _files_at(where, index, self.tars, self._opened))
        self._refuse_missing_files()

    @property
    def path(self) -> Path:
        """The folder of the files; for a remote dataset the cache's, which holds only the files used so far."""
        return self.files.folder

    @property
    def is_remote(self) -> bool:
        """Whether the dataset is at an address."""
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

    def _refuse_missing_files(self) -> None:
        there = set(self.files.names())
        for name in self.index.shard_files():
            if name not in there:
                raise DatasetError(
                    f"{self.place / SHARD_FOLDER / name} is missing, but {INDEX_FILE} lists it. "
                    "Convert the dataset again."
                )

    @cached_property
    def tokenizer_path(self) -> Path:
        """Local path of tokenizer.json, after a check of its digest. Raises DatasetError if the file has changed."""
        try:
            path = self.files.whole(TOKENIZER_FILE)
            if self.index.tokenizer_digest not in (None, sha256_of(path)):
                raise DatasetError(
                    f"{path} was changed after conversion: its sha256 differs from the one in "
                    f"{INDEX_FILE}. Convert the dataset again."
                )
        except ObjectStoreError:
            raise  # the failure says nothing about the file
        except OSError as error:
            raise DatasetError(
                f"{self.place / TOKENIZER_FILE} cannot be read: {error}. Convert the dataset again."
            ) from error
        return path

    @cached_property
    def _open_shards(self) -> OpenFiles[Shard]:
        from .shard import OpenFiles, Shard  # importing numba takes half a second, and the index does not need it

        return OpenFiles(lambda number: Shard(self.files, self.index, number, self.place, self.file))

    @cached_property
    def _open_tars(self) -> OpenFiles[Descriptor]:
        from .raw_bytes import Descriptor
        from .shard import OpenFiles

        return OpenFiles(lambda number: Descriptor(cast(TarFiles, self.tars).path(number), os.O_NOFOLLOW))

    def _opened(self, number: int) -> Shard:
        return self._open_shards[number]

    def shard(self, number: int) -> Shard:
        """Return a shard's pixels and tokens; it stays open as long as the caller keeps it.

        Read only samples that `files` holds. Raises DatasetError if the shard was cut short or belongs to another
        dataset, OSError if it cannot be opened.
        """
        self.files.prepare(number)
        return self._open_shards[number]

    def records(self, number: int) -> NDArray[np.void]:
        """Return RECORD of all rows of a shard. Raises DatasetError naming a damaged row, OSError."""
        self.files.bring_records(number)
        return self.shard(number).records()

    def file(self, shard: int, place: int) -> Descriptor:
        """Return the file at one of `Located`'s places, for `pread`, open as long as the caller keeps it.

        Raises DatasetError, OSError.
        """
        from .shard import open_beton

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
    def local(folder: Path) -> DatasetFiles:
        if tars is None or not tars.root.is_remote:
            return LocalFiles(folder)
        from .remote.files import RemoteTars

        return RemoteTars(folder, index, tars, opened)

    def remote(address: Address) -> DatasetFiles:
        from .remote.files import RemoteFiles  # imports numba

        return RemoteFiles(address, index, tars, opened)

    return made_for(place, local, remote)


def _seen(schema: pa.Schema) -> pa.Schema:
    """Return the schema that readers see unless they name CAPTIONS."""
    place = schema.get_field_index(CAPTIONS)
    return schema if place < 0 else schema.set(place, pa.field(CAPTION, pa.string()))


def _stored(schema: pa.Schema, names: Sequence[str]) -> list[str]:
    """Return the stored columns behind the requested ones."""
    has_list = CAPTIONS in schema.names
    return [*dict.fromkeys(CAPTIONS if name == CAPTION and has_list else name for name in names)]


def _with_first_captions(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add the first entry, or null, of the list of captions, if there is one."""
    place = batch.schema.get_field_index(CAPTIONS)
    if place < 0:
        return batch
    lists = batch.column(place)
    if not pa.types.is_list(lists.type) or not pa.types.is_string(lists.type.value_type):
        raise pa.ArrowInvalid(f"{CAPTIONS} has type {lists.type}, not lists of strings")
    starts = pc.if_else(pc.greater(pc.list_value_length(lists), 0), lists.offsets[:-1], pa.scalar(None, pa.int32()))
    return batch.append_column(CAPTION, lists.values.take(starts))
