"""Read a store's snapshots without a lock, torch or changing the store; works while a run trains.

A damaged chunk raises an error that names the chunk and its file. The rows of a run on selected samples are read as
rows of the whole dataset; those of a run on a mixture of datasets are stored in another order than its samples.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import icechunk
import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import SuffixByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync

from ..storage.arrays import Bools, Int64s, Uint32s
from ..storage.bucket import Address
from ..storage.bucket_errors import ObjectStoreError, without_credentials
from ..storage.mixed_rows import MIXTURE, MixedRows
from ..storage.place import place_of
from ..storage.selection import ABOUT, IDS, Selection, SelectionError
from .commit import array_of
from .durable import Repository
from .errors import DamagedChunkError, FieldError, SnapshotNotFoundError
from .history import Snapshot
from .icechunk_files import is_damage
from .schema import Description

_UNREADABLE = (icechunk.IcechunkError, ValueError)
"""Errors that a damaged chunk causes: icechunk cannot find the file, or a zarr codec rejects its bytes."""
_FROM_BUCKET = re.compile(r"icechunk/src/storage/s3\.rs|Generic (GCS|MicrosoftAzure) error|operation lacked")
_NOT_IN_BUCKET = re.compile(r"\bNoSuchKey\b|\bInvalidRange\b")

Columns = dict[str, npt.NDArray[Any]]
"""By name, all of one length."""

ADVICE = (
    "Snapshots that do not share this chunk are still readable: `thermopile state log` lists the snapshots, "
    "`thermopile state check --all` checks each"
)
"""The end of every DamagedChunkError message."""


class StateReader:
    """The state of all samples at one snapshot; later writes are not visible.

    Use `open`. `column` reads one whole column, `rows` a range of ids from several columns, `rows_at` any ids, `array`
    only the indexed rows. All raise FieldError for an unknown column. All but `array` raise DamagedChunkError, which
    names the file, and SnapshotNotFoundError if the run has deleted the snapshot. A run on selected samples stores
    only their state; the others, and holes whatever their rows hold, read as never visited. All may then raise
    SelectionError.

        >>> reader = thermopile.StateReader.open("runs/mine/state")
        >>> reader.snapshot.tag, reader.column("image/tau").shape
        ('step-24', (72,))
    """

    def __init__(self, repository: Repository, snapshot: Snapshot, selection: Selection | None = None) -> None:
        """selection: the samples of the stored rows; None: the first ones. Use `open`, which finds the selection."""
        self._repository = repository
        self._description = description = repository.description
        self._group: zarr.Group = repository.group(snapshot)
        self.snapshot = snapshot
        self.selection = selection
        """The samples that the run trains on, but for its holes; None: all."""
        self.samples = selection.about.samples if selection else description.samples
        rows = min(description.samples, self.samples)  # the rows of a mixture are more than its samples
        self.kept = rows - (selection.about.holes or 0 if selection else 0)
        """Number of samples that the run trains on."""
        # Evenly spread selected samples give a chunk about this many ids, within the limit on memory.
        spread = -(-description.block_rows * self.samples // rows)
        self.block_rows = min(spread, max(description.block_rows, 2**18))
        """Rows per chunk. Reading whole chunks is fastest: chunk k holds ids from k * block_rows on."""
        self.dataset_fingerprint = description.dataset_fingerprint
        self.fields = description.schema.names
        """Names of the float32 fields."""
        self.initial = dict(description.schema.initial)
        """Initial value of each field, for unseen samples."""
        self.columns = description.schema.columns
        """The fields, then the uint32 columns `visits` and `last_step`."""

    @classmethod
    def open(cls, path: str | os.PathLike[str] | Address, at: str = "latest") -> StateReader:
        """Open the store at a path or an address, at a tag (`step-200`), a snapshot id, or `latest`.

        Raises StoreNotFoundError, or SnapshotNotFoundError, which lists the existing tags.
        """
        repository = Repository(place_of(path))
        return cls(repository, repository.resolve(at), selection_of(repository))

    def of_rows(self) -> StateReader:
        """Return a reader of the rows as stored: with a selection, their ids are positions."""
        return StateReader(self._repository, self.snapshot) if self.selection else self

    def array(self, name: str) -> zarr.Array[Any] | Scattered:
        """Return one column [samples], float32 or uint32, which reads chunks as it is indexed.

        It is a zarr array, or, with a selection, behaves like one for numbers, slices, ids and masks.
        """
        stored, selection = self.stored(name), self.selection
        return stored if selection is None else Scattered(stored, selection, self._description.schema.fill_value(name))

    def stored(self, name: str) -> zarr.Array[Any]:
        """Return one column as stored, [kept]: without the samples that the run does not train on."""
        return array_of(self._group, *self._known([name]))

    @property
    def has_carried_rows(self) -> bool:
        """Whether the run began with another run's rows, which have visits, but no last step of its own."""
        first = self._repository.history()[0]
        return isinstance(first, Snapshot) and first.step == 0 and first.bytes_written > 0

    def is_kept(self, start: int, stop: int) -> Bools:
        """Return which of the ids start … stop − 1 the run trains on, bool [stop − start]."""
        if self.selection is None:
            return np.ones(stop - start, dtype=bool)
        if self.selection.ids is None:
            return self.selection.are_present(range(start, stop))
        kept, (positions, places) = np.zeros(stop - start, dtype=bool), places_within(self.selection, start, stop)
        kept[places] = self.selection.are_present(range(*positions))
        return kept

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one whole column, [samples], float32 or uint32, in memory."""
        return self.rows(0, self.samples, [name])[name]

    def rows(self, start: int, stop: int, columns: Iterable[str] | None = None) -> Columns:
        """Return the rows of ids start … stop − 1 by column, each [stop − start]; all columns by default.

        Raises ValueError unless 0 <= start <= stop <= samples.
        """
        if not 0 <= start <= stop <= self.samples:
            raise ValueError(f"rows {start} … {stop} of a state of {self.samples:,} samples; ids are 0 … samples - 1")
        names = self._known(self.columns if columns is None else columns)
        try:
            if self.selection is not None:
                return self._scattered(self.selection, start, stop, names)
            return {name: read_rows(self._group, self._description.block_rows, name, start, stop) for name in names}
        except DamagedChunkError as error:
            if self._repository.holds(self.snapshot.id):
                raise
            raise SnapshotNotFoundError(
                f"{self._repository.path}: {self.snapshot.tag} was deleted while it was read; a run keeps only its "
                "newest snapshots. Read a later one"
            ) from error

    def rows_at(self, sample_ids: Int64s, columns: Iterable[str] | None = None) -> Columns:
        """Return the rows of any ids, int64 [b], by column, each [b]; all columns by default.

        Reads each chunk once, several concurrently: for 500 ids among 10⁷, four times as fast as `rows` for each id.
        Raises ValueError unless 0 <= id < samples.
        """
        wanted, places = np.unique(sample_ids, return_inverse=True)
        if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < self.samples:
            raise ValueError(f"ids {wanted[0]} to {wanted[-1]} of a state of {self.samples:,} samples")
        names = self._known(self.columns if columns is None else columns)
        try:
            arrays = {name: self.array(name) for name in names}
            return {
                name: (array[wanted] if isinstance(array, Scattered) else np.asarray(array.oindex[wanted]))[places]
                for name, array in arrays.items()
            }
        except (*_UNREADABLE, KeyError):
            # The error does not say which chunk failed; reading chunk by chunk does.
            for start in (np.unique(wanted // self.block_rows) * self.block_rows).tolist():
                self.rows(start, min(start + self.block_rows, self.samples), names)
            raise

    def _scattered(self, selection: Selection, start: int, stop: int, names: Iterable[str]) -> Columns:
        schema, places = self._description.schema, np.arange(stop - start)
        if selection.ids is None:
            rows = selection.positions(ids := places + start, ids)
            runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)  # neighbours, read together
            ranges = [(int(run[0]), int(run[-1]) + 1) if len(run) else (0, 0) for run in runs]
        else:
            within, places = places_within(selection, start, stop)
            ranges = [within]
        absent, found = ~self.is_kept(start, stop), Columns()
        for name in names:
            read = [read_rows(self._group, self._description.block_rows, name, *each) for each in ranges]
            found[name] = values = np.empty(stop - start, schema.dtype(name))
            values[places] = np.concatenate(read)
            values[absent] = schema.fill_value(name)
        return found

    def _known(self, columns: Iterable[str]) -> tuple[str, ...]:
        names = tuple(columns)
        if unknown := [name for name in names if name not in self.columns]:
            raise FieldError(f"the state has no column {unknown[0]!r}; it has {list(self.columns)}")
        return names


def selection_of(repository: Repository) -> Selection | None:
    """Return the selection that a store was created with, or that has its run's holes; None: all samples.

    Raises SelectionError if the folder next to the store does not hold that selection.
    """
    description, folder = repository.description, repository.path.with_name("selection")
    if description.selection is None and not (folder / ABOUT).exists():
        return None
    selection = MixedRows.read(folder) if (folder / MIXTURE).exists() else Selection(folder)
    about = selection.about
    if (about.ids, about.kept) != (description.selection, description.samples):
        raise SelectionError(
            f"{selection.folder} is another run's: it selects {about.kept:,} samples with the sha256 {about.ids}, but "
            f"{repository.path} is of {description.samples:,} with {description.selection}. Restore the run's own"
        )
    return selection if about.ids or about.without else None


def places_within(selection: Selection, start: int, stop: int) -> tuple[tuple[int, int], Int64s]:
    """Return the range of positions of the selected ids among start … stop − 1, and these ids minus start.

    Raises SelectionError if the ids are not ascending: the file is damaged.
    """
    assert selection.ids is not None
    first, end = np.searchsorted(selection.ids, (start, stop)).tolist()
    return (first, end), selection.ascending(IDS, selection.ids[first:end], start, stop) - start


class Scattered:
    """A stored column as a column of all samples; reads only the indexed rows."""

    def __init__(self, stored: zarr.Array[Any], selection: Selection, fill_value: float) -> None:
        self._stored, self._selection, self._fill_value = stored, selection, fill_value
        self.dtype: np.dtype[Any] = stored.dtype
        self.shape = (selection.about.samples,)
        self.ndim, self.size = 1, selection.about.samples

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        """Return values for a number, a slice, ids or a mask [samples]. Raises IndexError for an id out of range."""
        if isinstance(key, slice):
            low, high, step = key.indices(self.size)
            wanted = np.arange(low, high, step)
        else:
            wanted = np.asarray(key)
            wanted = np.flatnonzero(wanted) if wanted.dtype == bool else wanted.astype(np.int64)
            if wanted.size and not -self.size <= wanted.min() <= wanted.max() < self.size:
                raise IndexError(f"ids {wanted.min()} to {wanted.max()} of {self.size:,} samples")
            wanted = wanted % self.size
        if (ids := self._selection.ids) is None:
            places = self._selection.positions(wanted.reshape(-1), wanted).reshape(wanted.shape)
        else:
            places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
        present = self._selection.are_present(places) & (ids is None or ids[places] == wanted)
        values = np.full(wanted.shape, self._fill_value, self.dtype)
        if present.any():
            values[present] = self._stored.oindex[places[present]]
        return values[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype)


def read_records(group: zarr.Group, description: Description, start: int, stop: int, records: Uint32s) -> None:
    """Read rows start … stop − 1 of all columns into `records`, [stop − start, row_words]. Raises as `read_rows`."""
    for place, column in enumerate(description.schema.columns):
        records[:, place] = read_rows(group, description.block_rows, column, start, stop).view(np.uint32)


def read_rows(group: zarr.Group, block_rows: int, column: str, start: int, stop: int) -> npt.NDArray[np.generic]:
    """Return rows start … stop − 1 of one column, [stop − start], float32 or uint32.

    A block that was never written has no file and reads as initial values. Raises DamagedChunkError, naming array,
    chunk and file, if a chunk is missing, truncated or fails its checksum; OSError if the process cannot read, for
    example because it is out of file descriptors, and the chunk may be intact.
    """
    try:
        array = array_of(group, column)
    except (*_UNREADABLE, KeyError) as error:
        raise DamagedChunkError(f"array {column!r} is missing, or its metadata damaged: {error!r}. {ADVICE}") from error
    try:
        return np.asarray(array[start:stop])
    except _UNREADABLE:
        # Retry chunk by chunk: the error does not say which chunk failed.
        chunks = range(start // block_rows, -(-stop // block_rows))
        pieces = [_read_chunk(array, chunk * block_rows, block_rows) for chunk in chunks]
        skipped = chunks.start * block_rows
        return np.concatenate(pieces)[start - skipped : stop - skipped]


def _read_chunk(array: zarr.Array[Any], start: int, block_rows: int) -> npt.NDArray[np.generic]:
    stop, chunk = min(start + block_rows, array.shape[0]), start // block_rows
    try:
        return np.asarray(array[start:stop])
    except _UNREADABLE as error:
        damage = _damage(error) if isinstance(error, icechunk.IcechunkError) else _damaged_bytes(array, chunk)
        raise DamagedChunkError(
            f"array {array.path!r}, chunk {chunk} (rows {start} … {stop - 1}) cannot be read: {damage}. {ADVICE}"
        ) from error


def _damage(error: icechunk.IcechunkError, reason: str | None = None) -> str:
    """Return the file that an error concerns, and its fault. Raises OSError if the file may be intact."""
    text = str(error)
    # A resume falls back to an older snapshot if one is damaged. Running out of descriptors or memory is not damage,
    # nor is an unreachable store.
    if _FROM_BUCKET.search(text) and not _NOT_IN_BUCKET.search(text):
        cause = without_credentials(text.strip().splitlines()[-1].strip(" |`->"))
        raise ObjectStoreError(
            f"the object store cannot be used: {cause}. Check AWS_ENDPOINT_URL, AWS_REGION, credentials and network"
        ) from error
    if found := re.search(r"\(os error (\d+)\)", text):
        failure = OSError(int(found[1]), os.strerror(int(found[1])))
        if not is_damage(failure):
            raise failure from error
    file = re.search(r"\b(chunk|manifest|snapshot)(?:s/|_id=)([0-9A-Z]{20})\b", text)
    # icechunk formats the error as a tree over several lines; the last line is the root cause.
    reason = reason or text.strip().splitlines()[-1].strip(" |`->")
    return f"{f'{file[1]}s/{file[2]}' if file else 'a file'} in the state directory: {reason}"


def _damaged_bytes(array: zarr.Array[Any], chunk: int) -> str:
    """Find the file whose bytes fail their checksum."""
    key = f"{array.path}/{array.metadata.encode_chunk_key((chunk,))}"
    reason = "its checksum does not match"
    try:
        stored = sync(array.store.get(key, default_buffer_prototype()))
    except icechunk.IcechunkError as error:
        return _damage(error)
    try:
        # Only icechunk's errors name a chunk's file. It rejects a read of zero bytes, so this provokes such an error.
        sync(array.store.get(key, default_buffer_prototype(), SuffixByteRequest(0)))
    except icechunk.IcechunkError as refusal:
        length = re.search(r"range=(\d+)\.\.", str(refusal))
        if stored is not None and length and len(stored) < int(length[1]):
            reason = f"it holds {len(stored):,} of the {int(length[1]):,} bytes written"
        return _damage(refusal, reason)
    return f"the manifest that holds it in the state directory: {reason}"
