"""Write one snapshot: each rank writes its blocks, rank 0 the rest. It takes effect once it is announced."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import icechunk
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec

from ..storage.place import Place
from . import icechunk_files
from .history import Snapshot
from .schema import Description

About = Mapping[str, Any]
"""Metadata of a snapshot: its step, epoch, config_hash and dataset_fingerprint, which icechunk stores too."""
Share = tuple[icechunk.ForkSession, int]
"""One rank's part of a snapshot: the session that holds its chunks, and their size in bytes."""


@dataclass(frozen=True)
class ColumnPart:
    """Rows from `start` in every column, arrays of equal length; whole blocks except at the end of the store."""

    start: int
    columns: Mapping[str, npt.NDArray[Any]]


def write_initial_values(
    state: Place, description: Description, about: About, carried: Iterable[ColumnPart] = ()
) -> Snapshot:
    """Create a repository at `state` and write its first snapshot, with every sample at its initial values.

    carried: initial rows taken from another run's state.
    """
    size = 0
    with state.parent.written_through():
        # Create without settings, which would be recorded, then open with ours.
        icechunk.Repository.create(icechunk_files.storage(state))
        session = icechunk_files.open_repository(state).writable_session(icechunk_files.BRANCH)
        group = zarr.create_group(session.store)
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
        for part in carried:
            for column, values in part.columns.items():
                array_of(group, column)[part.start : part.start + len(values)] = values
                size += values.nbytes
        snapshot_id = session.flush("the initial values", metadata=dict(about))
    return _read_back(state, snapshot_id, about, {}, size)


def fork(state: Place, base: Snapshot, world: int) -> list[icechunk.ForkSession]:
    """Return one session per rank; icechunk requires all sessions before any write."""
    icechunk_files.refuse_links(state)
    icechunk_files.point_reference_at(state, base.id)
    session = _session_at(state, base)
    return [session.fork() for _ in range(world)]


def write_parts(
    state: Place, session: icechunk.ForkSession, columns: Iterable[str], parts: Iterable[ColumnPart]
) -> Share:
    """Write a rank's rows, durable on return; `parts` is consumed lazily."""
    written = 0
    with state.written_through():
        group = zarr.open_group(session.store, mode="r+")
        arrays = {column: array_of(group, column) for column in columns}
        for part in parts:
            for column, values in part.columns.items():
                arrays[column][part.start : part.start + len(values)] = values
                written += values.nbytes
    return session, written


def merge(state: Place, shares: list[Share], base: Snapshot, about: About) -> Snapshot:
    """Write the snapshot from all ranks' shares and read it back, but do not announce it yet."""
    with state.written_through():
        session = _session_at(state, base)
        session.merge(*(fork for fork, _ in shares))
        # icechunk rejects a commit without changes, which occurs if every row since the last snapshot was refused.
        zarr.open_group(session.store, mode="r+").update_attributes({"step": about["step"]})
        snapshot_id = session.flush(f"state after step {about['step']}", metadata=dict(about))
    return _read_back(state, snapshot_id, about, base.files, sum(size for _, size in shares))


def _session_at(state: Place, base: Snapshot) -> icechunk.Session:
    while True:
        session = icechunk_files.open_repository(state).writable_session(icechunk_files.BRANCH)
        if session.snapshot_id == base.id:
            return session
        # A late request of an earlier writer in a bucket, which was cut off, has moved the reference.
        icechunk_files.point_reference_at(state, base.id)


def _read_back(state: Place, snapshot_id: str, about: About, base_files: Mapping[str, str], size: int) -> Snapshot:
    written_at, files = icechunk_files.written_files(state, snapshot_id, base_files)
    return Snapshot(id=snapshot_id, written_at=written_at, bytes_written=size, files=files, **about)


def array_of(group: zarr.Group, column: str) -> zarr.Array[Any]:
    return cast("zarr.Array[Any]", group[column])
