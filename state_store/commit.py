"""Writing one snapshot: every rank its blocks, the first rank the rest; nothing of it counts until it is announced."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import icechunk
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec

from . import disk, icechunk_files
from .description import Description
from .errors import DamagedFileError, SnapshotError, StateStoreError
from .history import Snapshot
from .ranks import Ranks

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ColumnPart:
    """The rows from `start` on of every column, arrays of one length; whole blocks, but for the store's end."""

    start: int
    columns: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Label:
    """What a snapshot is told about itself. dataset_fingerprint: of the run that writes it."""

    step: int
    epoch: int
    config_hash: str
    dataset_fingerprint: str


@dataclass(frozen=True)
class Share:
    """What one rank has written: its session with the chunks, and their size in bytes."""

    fork: icechunk.ForkSession
    bytes_written: int


@dataclass(frozen=True)
class Failure:
    """Why a rank could not do its part."""

    rank: int
    reason: str
    error: Exception | None = field(compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure, (self.rank, self.reason, None)  # between ranks the words must do: not every error pickles


def attempt(ranks: Ranks, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Failure:
    """Do some work; a failure is returned, for all ranks to know."""
    try:
        return work(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 (handed on: to every rank)
        return Failure(ranks.rank, reason_of(error), error)


def reason_of(error: Exception) -> str:
    """Return in one line what went wrong in the first place."""
    if isinstance(error, icechunk.IcechunkError):
        # icechunk draws a tree over many lines; at its foot is what was wrong in the first place.
        lines = str(error).strip().splitlines()
        return lines[-1].partition("`-> ")[2] or lines[0].removeprefix("x ")
    return str(error) if isinstance(error, StateStoreError) else f"{type(error).__name__}: {error}"


def write_initial_values(state: Path, description: Description, label: Label) -> Snapshot:
    """Make a repository at `state` and write its first snapshot, every sample at its initial values."""
    with disk.written_through(state.parent):
        session = icechunk.Repository.create(icechunk_files.storage(state)).writable_session(icechunk_files.BRANCH)
        _create_arrays(session.store, description)
        snapshot_id = session.flush("the initial values", metadata=_metadata(label))
    return _read_back(state, snapshot_id, label, {}, bytes_written=0)


def fork(state: Path, base: Snapshot | None, world: int) -> list[icechunk.ForkSession]:
    """Return a session for each rank; all are made before anything is written, as icechunk wants it.

    Raises SnapshotError where the base is damaged.
    """
    if base is None:
        raise ValueError("rank 0 must say which snapshot to build on")
    icechunk_files.refuse_links(state)
    try:
        icechunk_files.verify(state, base.files)
    except DamagedFileError as error:
        raise SnapshotError(
            f"It builds on {base.tag}, but {error}. Go back to an older snapshot: `thermopile state check RUN --all` "
            "tells which are sound, open(at=…) resumes there"
        ) from error
    icechunk_files.point_reference_at(state, base.id)
    session = icechunk_files.open_repository(state).writable_session(icechunk_files.BRANCH)
    return [session.fork() for _ in range(world)]


def write_parts(
    state: Path, session: icechunk.ForkSession, columns: Iterable[str], parts: Iterable[ColumnPart]
) -> Share:
    """Write a rank's rows, durable on return; `parts` are made as they are asked for."""
    written = 0
    with disk.written_through(state):
        group = zarr.open_group(session.store, mode="r+")
        arrays = {column: array_of(group, column) for column in columns}
        for part in parts:
            for column, values in part.columns.items():
                arrays[column][part.start : part.start + len(values)] = values
                written += values.nbytes
    return Share(session, written)


def merge(state: Path, shares: list[Share], base: Snapshot, label: Label) -> Snapshot:
    """Write the snapshot of what all ranks have written, and read it back; it is not announced yet."""
    with disk.written_through(state):
        session = icechunk_files.open_repository(state).writable_session(icechunk_files.BRANCH)
        session.merge(*(share.fork for share in shares))
        # icechunk refuses a commit without a change, as when every row since the last snapshot was refused.
        zarr.open_group(session.store, mode="r+").update_attributes({"step": label.step})
        snapshot_id = session.flush(f"state after step {label.step}", metadata=_metadata(label))
    return _read_back(state, snapshot_id, label, base.files, sum(share.bytes_written for share in shares))


def _read_back(
    state: Path, snapshot_id: str, label: Label, base_files: Mapping[str, str], bytes_written: int
) -> Snapshot:
    info, files = icechunk_files.written_files(state, snapshot_id)
    # A manifest that the base has as well was not written now: what was damaged since must not be taken as right.
    for name in files.keys() & base_files.keys():
        icechunk_files.verify(state, {name: base_files[name]})
    return Snapshot(
        info.id, label.step, label.epoch, label.config_hash, info.written_at, label.dataset_fingerprint, bytes_written,
        files,
    )  # fmt: skip


def _metadata(label: Label) -> dict[str, Any]:
    """What icechunk keeps with the snapshot; the index says the same, and alone is asked."""
    return {
        "step": label.step,
        "epoch": label.epoch,
        "config_hash": label.config_hash,
        "dataset_fingerprint": label.dataset_fingerprint,
    }


def array_of(group: zarr.Group, column: str) -> "zarr.Array[Any]":
    return cast("zarr.Array[Any]", group[column])


def _create_arrays(store: icechunk.IcechunkStore, description: Description) -> None:
    group = zarr.create_group(store)
    for column in description.schema.columns:
        group.create_array(
            column,
            shape=(description.samples,),
            chunks=(description.block_rows,),
            dtype=description.schema.dtype(column),
            fill_value=description.schema.fill_value(column),
            # A checksum, so that a damaged chunk is an error and never a value. No compression: mantissas of a moving
            # average hardly compress; the attempt costs more time than the disk saves.
            compressors=Crc32cCodec(),
            filters=None,
        )
