"""The durable tier: one zarr array a column in an icechunk repository, one tagged commit a snapshot.

The branch `main` holds the history of the run; a snapshot counts when it is tagged and its commit is on that branch.
What a crash leaves beside it, an untagged commit or a tag off the branch, is therefore never seen.
"""

import atexit
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import icechunk
import numpy as np
import numpy.typing as npt
import zarr

from .errors import SnapshotNotFoundError, StoreExistsError, StoreMismatchError, StoreNotFoundError
from .schema import Schema

if TYPE_CHECKING:
    from .rows import RowRange  # needs numba and torch, which a reader does without

FORMAT_VERSION = 1
_BRANCH = "main"
_TAG = re.compile(r"step-\d+(\.\d+)?")

if "ICECHUNK_LOG" not in os.environ:
    # icechunk warns at every open that commits to a local directory must not be concurrent; the writer lock sees to
    # that. Its other warnings stay, and so does a filter of the user's own.
    icechunk.set_logs_filter("warn,icechunk::storage::object_store=error")

# A thread of icechunk that has just handed over a result still has to return through Python. Python ends such a thread
# when it shuts down, and icechunk then aborts the whole process. So it is let through first.
atexit.register(time.sleep, 0.05)


@dataclass(frozen=True)
class Snapshot:
    """One committed state of all samples: what every put of steps up to `step` left behind."""

    id: str
    """icechunk's snapshot id."""
    tag: str
    """`step-N`; `step-N.2`, `step-N.3` … after a resume undid an earlier snapshot of that step."""
    step: int
    epoch: int
    config_hash: str
    written_at: datetime
    """When the commit was made, in UTC."""


@dataclass(frozen=True)
class Description:
    """What a store is made for; written into the attributes of the repository's root group."""

    samples: int
    schema: Schema
    block_rows: int
    """Rows in a zarr chunk, the unit of writing."""
    dataset_fingerprint: str

    def __post_init__(self) -> None:
        if self.samples < 1 or self.block_rows < 1:
            raise ValueError(
                f"a store of {self.samples} samples in blocks of {self.block_rows} rows; both must be at least 1"
            )

    def to_attributes(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "samples": self.samples,
            "fields": self.schema.to_json(),
            "block_rows": self.block_rows,
            "dataset_fingerprint": self.dataset_fingerprint,
        }

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any], path: Path) -> "Description":
        version = attributes.get("format_version")
        if version != FORMAT_VERSION:
            raise StoreNotFoundError(
                f"{path}: the state has format version {version}, this thermopile reads {FORMAT_VERSION}; "
                "use the version that wrote it"
            )
        return cls(
            samples=attributes["samples"],
            schema=Schema.from_json(attributes["fields"]),
            block_rows=attributes["block_rows"],
            dataset_fingerprint=attributes["dataset_fingerprint"],
        )

    def check_same(self, *, samples: int, schema: Schema, dataset_fingerprint: str, path: Path) -> None:
        """Raise StoreMismatchError, naming both sides, where the store was made for something else."""
        pairs = [
            ("dataset fingerprint", self.dataset_fingerprint, dataset_fingerprint),
            ("number of samples", self.samples, samples),
            ("fields", dict(self.schema.initial), dict(schema.initial)),
        ]
        differences = [
            f"{what}: the store has {have}, this run has {want}" for what, have, want in pairs if have != want
        ]
        if differences:
            raise StoreMismatchError(
                f"{path} was made for another run. {'; '.join(differences)}. "
                "Pass the dataset and the objective that this store was made for, or start a new run"
            )


class Repository:
    """The snapshots of one store. Writing (`commit`, `undo_after`) is for the holder of the writer lock alone."""

    def __init__(self, path: Path, repository: icechunk.Repository) -> None:
        self.path = path
        self._repository = repository

    @classmethod
    def create(cls, path: Path, description: Description) -> "Repository":
        """Make a repository whose first snapshot, `step-0`, is every sample at its initial values.

        It is built beside `path` and renamed: an interrupted creation leaves no store, rather than a broken one.
        Raises StoreExistsError where `path` is a file or a directory with anything in it.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise StoreExistsError(f"{path} exists already; resume that run, or choose another directory")
        building = path.with_name(f".{path.name}.partial")
        shutil.rmtree(building, ignore_errors=True)
        made = cls(building, icechunk.Repository.create(_storage(building)))
        session = made._repository.writable_session(_BRANCH)
        group = zarr.create_group(session.store, attributes=description.to_attributes())
        for column in description.schema.columns:
            group.create_array(
                column,
                shape=(description.samples,),
                chunks=(description.block_rows,),
                dtype=description.schema.dtype(column),
                fill_value=description.schema.fill_value(column),
                # Mantissas of a moving average hardly compress; the attempt costs more time than the disk saves.
                compressors=None,
                filters=None,
            )
        made._commit(session, step=0, epoch=0, config_hash="", dataset_fingerprint=description.dataset_fingerprint)
        building.rename(path)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Repository":
        """Open an existing repository; raises StoreNotFoundError where there is none."""
        # The directory is looked for first: icechunk would create it just to find it empty.
        if not path.is_dir() or not icechunk.Repository.exists(_storage(path)):
            raise StoreNotFoundError(f"{path} holds no state store; check the path of the run")
        return cls(path, icechunk.Repository.open(_storage(path)))

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots of the run's history, oldest first."""
        tag_of = {self._repository.lookup_tag(tag): tag for tag in self._repository.list_tags() if _TAG.fullmatch(tag)}
        history = [info for info in self._repository.ancestry(branch=_BRANCH) if info.id in tag_of]
        return [_snapshot(info, tag_of[info.id]) for info in reversed(history)]

    def resolve(self, at: str) -> Snapshot:
        """Return the snapshot that `at` names: `latest`, a tag, `step-N` (the one in the history), or a snapshot id.

        Raises SnapshotNotFoundError that lists the tags there are.
        """
        snapshots = self.snapshots()
        if not snapshots:
            raise SnapshotNotFoundError(
                f"{self.path} holds no snapshot: its creation was interrupted. Delete it and start again"
            )
        if at == "latest":
            return snapshots[-1]
        for snapshot in snapshots:
            if at in (snapshot.tag, f"step-{snapshot.step}", snapshot.id):
                return snapshot
        tags = ", ".join(snapshot.tag for snapshot in snapshots)
        raise SnapshotNotFoundError(f"{self.path} holds no snapshot {at!r}; there are: {tags}, latest")

    def group(self, snapshot: Snapshot) -> zarr.Group:
        """Return the arrays as they were at `snapshot`, read-only."""
        return zarr.open_group(self._repository.readonly_session(snapshot_id=snapshot.id).store, mode="r")

    def describe(self, snapshot: Snapshot) -> Description:
        return Description.from_attributes(self.group(snapshot).attrs.asdict(), self.path)

    def undo_after(self, snapshot: Snapshot) -> None:
        """Make `snapshot` the last one: put the branch back to it and delete the tags of what came after."""
        # The branch first: a crash after that line leaves tags off the branch, which no longer count.
        if self._repository.lookup_branch(_BRANCH) != snapshot.id:
            self._repository.reset_branch(_BRANCH, snapshot.id)
        kept = {info.id for info in self._repository.ancestry(branch=_BRANCH)}
        for tag in self._repository.list_tags():
            if _TAG.fullmatch(tag) and self._repository.lookup_tag(tag) not in kept:
                self._repository.delete_tag(tag)

    def commit(
        self, changed: Iterable["RowRange"], *, step: int, epoch: int, config_hash: str, dataset_fingerprint: str
    ) -> Snapshot:
        """Write the changed blocks whole, in a session of their own, and commit and tag them as one snapshot."""
        session = self._repository.writable_session(_BRANCH)
        group = zarr.open_group(session.store, mode="r+")
        for rows in changed:
            for column in rows.schema.columns:
                array_of(group, column)[rows.start : rows.stop] = rows.column(column)
        return self._commit(
            session, step=step, epoch=epoch, config_hash=config_hash, dataset_fingerprint=dataset_fingerprint
        )

    def _commit(self, session: icechunk.Session, *, step: int, **metadata: int | str) -> Snapshot:
        # icechunk refuses a commit without a change, as when every row since the last snapshot was refused.
        zarr.open_group(session.store, mode="r+").update_attributes({"step": step})
        snapshot_id = session.commit(f"state after step {step}", metadata={"step": step, **metadata})
        return _snapshot(self._repository.lookup_snapshot(snapshot_id), self._tag(step, snapshot_id))

    def _tag(self, step: int, snapshot_id: str) -> str:
        attempt, tag = 1, f"step-{step}"
        while True:
            try:
                self._repository.create_tag(tag, snapshot_id)
                return tag
            except icechunk.IcechunkError as error:
                # A deleted tag keeps its name for ever and is not listed, so it is found out by trying.
                if "tag already exists" not in str(error):
                    raise
            attempt += 1
            tag = f"step-{step}.{attempt}"


def list_snapshots(path: str | os.PathLike[str]) -> list[Snapshot]:
    """Return the snapshots of the store at `path`, oldest first; needs no lock.

    Raises StoreNotFoundError where there is no store.
    """
    return Repository.open(Path(path)).snapshots()


def array_of(group: zarr.Group, column: str) -> "zarr.Array[Any]":
    return cast("zarr.Array[Any]", group[column])


def read_columns(
    group: zarr.Group, description: Description, start: int, stop: int
) -> dict[str, npt.NDArray[np.generic]]:
    """Return every column of the rows start … stop − 1, each [stop − start]."""
    return {column: np.asarray(array_of(group, column)[start:stop]) for column in description.schema.columns}


def _storage(path: Path) -> icechunk.Storage:
    return icechunk.local_filesystem_storage(str(path.absolute()))


def _snapshot(info: icechunk.SnapshotInfo, tag: str) -> Snapshot:
    return Snapshot(
        id=info.id,
        tag=tag,
        step=info.metadata["step"],
        epoch=info.metadata["epoch"],
        config_hash=info.metadata["config_hash"],
        written_at=info.written_at,
    )
