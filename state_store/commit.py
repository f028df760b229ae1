"""Writing one snapshot: each rank writes its blocks, rank 0 the rest. It takes effect when it is announced."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import icechunk
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec

from . import disk, icechunk_files
from .errors import DamagedFileError, SnapshotError, StateStoreError
from .history import Snapshot
from .ranks import Ranks
from .schema import Description

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ColumnPart:
    """Rows from `start` on of every column, arrays of equal length; whole blocks except at the end of the store."""

    start: int
    columns: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Label:
    """Metadata of a snapshot. dataset_fingerprint: of the run that writes it."""

    step: int
    epoch: int
    config_hash: str
    dataset_fingerprint: str


@dataclass(frozen=True)
class Share:
    """What one rank has written: its session, which holds the chunks, and their size in bytes."""

    fork: icechunk.ForkSession
    bytes_written: int


@dataclass(frozen=True)
class Failure:
    """Why a rank failed."""

    rank: int
    reason: str
    error: Exception | None = field(compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure, (self.rank, self.reason, None)  # only the text crosses ranks: not every error can be pickled


def attempt(ranks: Ranks, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Failure:
    """Run `work`; return its failure, so that all ranks can be informed."""
    try:
        return work(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 (handed on: to every rank)
        return Failure(ranks.rank, reason_of(error), error)


def reason_of(error: Exception) -> str:
    """Return the root cause in one line."""
    if isinstance(error, icechunk.IcechunkError):
        # icechunk formats the error as a tree over several lines; the last line is the root cause.
        lines = str(error).strip().splitlines()
        return lines[-1].partition("`-> ")[2] or lines[0].removeprefix("x ")
    return str(error) if isinstance(error, StateStoreError) else f"{type(error).__name__}: {error}"


def write_initial_values(state: Path, description: Description, label: Label) -> Snapshot:
    """Create a repository at `state` and write its first snapshot, with every sample at its initial values."""
    with disk.written_through(state.parent):
        session = icechunk.Repository.create(icechunk_files.storage(state)).writable_session(icechunk_files.BRANCH)
        _create_arrays(session.store, description)
        snapshot_id = session.flush("the initial values", metadata=_metadata(label))
    return _read_back(state, snapshot_id, label, {}, bytes_written=0)


def fork(state: Path, base: Snapshot | None, world: int) -> list[icechunk.ForkSession]:
    """Return one session per rank; icechunk requires all of them before anything is written.

    Raises SnapshotError if the base is damaged.
    """
    if base is None:
        raise ValueError("rank 0 must give the base snapshot")
    icechunk_files.refuse_links(state)
    try:
        icechunk_files.verify(state, base.files)
    except DamagedFileError as error:
        raise SnapshotError(
            f"It builds on {base.tag}, but {error}. Use an older snapshot: `thermopile state check RUN --all` "
            "lists the intact ones, open(at=…) resumes there"
        ) from error
    icechunk_files.point_reference_at(state, base.id)
    session = icechunk_files.open_repository(state).writable_session(icechunk_files.BRANCH)
    return [session.fork() for _ in range(world)]


def write_parts(
    state: Path, session: icechunk.ForkSession, columns: Iterable[str], parts: Iterable[ColumnPart]
) -> Share:
    """Write a rank's rows, durable on return; `parts` is consumed lazily."""
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
    """Write the snapshot from all ranks' shares and read it back; it is not announced yet."""
    with disk.written_through(state):
        session = icechunk_files.open_repository(state).writable_session(icechunk_files.BRANCH)
        session.merge(*(share.fork for share in shares))
        # icechunk rejects a commit without changes, which occurs if every row since the last snapshot was refused.
        zarr.open_group(session.store, mode="r+").update_attributes({"step": label.step})
        snapshot_id = session.flush(f"state after step {label.step}", metadata=_metadata(label))
    return _read_back(state, snapshot_id, label, base.files, sum(share.bytes_written for share in shares))


def _read_back(
    state: Path, snapshot_id: str, label: Label, base_files: Mapping[str, str], bytes_written: int
) -> Snapshot:
    info, files = icechunk_files.written_files(state, snapshot_id)
    # A manifest shared with the base was written earlier: verify it, or damage since then would be recorded as correct.
    for name in files.keys() & base_files.keys():
        icechunk_files.verify(state, {name: base_files[name]})
    return Snapshot(
        info.id, label.step, label.epoch, label.config_hash, info.written_at, label.dataset_fingerprint, bytes_written,
        files,
    )  # fmt: skip


def _metadata(label: Label) -> dict[str, Any]:
    """Metadata for icechunk. The index has the same, and only the index is read."""
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
            # A checksum turns a damaged chunk into an error instead of a wrong value. No compression: mantissas of
            # moving averages hardly compress, and trying costs more time than it saves.
            compressors=Crc32cCodec(),
            filters=None,
        )
