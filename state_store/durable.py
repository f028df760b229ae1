"""The durable tier: one zarr array a column in an icechunk repository, one tag a snapshot.

The tags alone are the run's history: what has no tag was never written, whatever a crash left of it. Nothing that a
reader or a resumed run relies on is ever written twice, and a tag is created once all that it stands for is on the
disk: no crash, not even a power failure, can leave half a snapshot.
"""

import atexit
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import icechunk
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec

from . import disk
from .errors import (
    DamagedChunkError,
    SnapshotError,
    SnapshotNotFoundError,
    StoreExistsError,
    StoreMismatchError,
    StoreNotFoundError,
)
from .ranks import Ranks
from .schema import Schema

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

FORMAT_VERSION = 2
_FIRST_BRANCH = "main"
"""Every repository has it. It stays at the empty snapshot that icechunk begins with: moving it would overwrite it."""
_WRITING = "writing"
"""The branch of a commit under way, which icechunk asks for; one that is found was left by a crash."""
_TAG = re.compile(r"step-\d+(\.\d+)?")
_EVERYTHING = datetime.max.replace(tzinfo=UTC)
"""icechunk expires and collects what is older than this. Only one process writes, so no clock need be asked."""
_ABANDONED = "*#*"
"""icechunk writes beside an object, as `name#1`, and renames; a kill leaves that file, and no collection sees it."""

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
    dataset_fingerprint: str
    bytes_written: int
    """Size of the rows written for it: those changed since the snapshot before."""


@dataclass(frozen=True)
class UnreadableSnapshot:
    """A snapshot that was announced, and whose file is damaged since."""

    tag: str
    id: str
    reason: str
    """What icechunk says of it."""

    @property
    def file(self) -> str:
        """Path in the directory of the state."""
        return f"snapshots/{self.id}"

    def __str__(self) -> str:
        return (
            f"the snapshot {self.tag} cannot be read: the file {self.file} in the directory of the state is damaged or "
            f"missing ({self.reason})"
        )


@dataclass(frozen=True)
class ColumnPart:
    """The rows from `start` on of every column, arrays of one length; whole blocks, but for the store's end."""

    start: int
    columns: Mapping[str, npt.NDArray[Any]]


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
    """The snapshots of one store.

    Writing (`commit`, `undo_after`, `retain`) is for the holder of the writer lock alone, one call at a time.
    """

    def __init__(self, path: Path, repository: icechunk.Repository) -> None:
        self.path = path
        self._repository = repository

    @classmethod
    def create(cls, path: Path, description: Description) -> "Repository":
        """Make a repository whose first snapshot, `step-0`, is every sample at its initial values.

        It is built beside `path` and renamed: an interrupted creation leaves no store, rather than a broken one.
        Raises StoreExistsError where `path` is a file or a directory with anything in it, SnapshotError where the disk
        does not take it.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise StoreExistsError(f"{path} exists already; resume that run, or choose another directory")
        building = path.with_name(f".{path.name}.partial")
        shutil.rmtree(building, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _refusing(f"{path} could not be made"), disk.written_through(path.parent):
            made = cls(building, icechunk.Repository.create(_storage(building)))
            session = made._repository.writable_session(_FIRST_BRANCH)
            _create_arrays(session.store, description)
            metadata = _metadata(0, 0, "", description.dataset_fingerprint, bytes_written=0)
            made._create_tag(0, session.flush("the initial values", metadata=metadata))
        building.rename(path)
        disk.sync(path.parent)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Repository":
        """Open an existing repository; raises StoreNotFoundError where there is none."""
        # The directory is looked for first: icechunk would create it just to find it empty.
        if not path.is_dir() or not icechunk.Repository.exists(_storage(path)):
            raise StoreNotFoundError(f"{path} holds no state store; check the path of the run")
        return cls(path, icechunk.Repository.open(_storage(path)))

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots of the run's history that can be read, oldest first."""
        return [entry for entry in self.history() if isinstance(entry, Snapshot)]

    def unreadable(self) -> list[UnreadableSnapshot]:
        """Return the snapshots of the run's history that are damaged, oldest first."""
        return [entry for entry in self.history() if isinstance(entry, UnreadableSnapshot)]

    def history(self) -> list[Snapshot | UnreadableSnapshot]:
        """Return all snapshots of the run's history, oldest first."""
        return [entry for entry in map(self._read, self._tags()) if entry is not None]

    def resolve(self, at: str) -> Snapshot:
        """Return the snapshot that `at` names: `latest`, a tag, `step-N` (the one in the history), or a snapshot id.

        `latest` passes over snapshots that cannot be read, with a warning in the log. Raises SnapshotNotFoundError that
        lists the tags there are, or names the damaged file of the snapshot asked for.
        """
        history = self.history()
        if not history:
            raise SnapshotNotFoundError(
                f"{self.path} holds no snapshot: its creation was interrupted. Delete it and start again"
            )
        if at == "latest":
            return self._latest(history)
        tags = ", ".join(entry.tag for entry in history if isinstance(entry, Snapshot))
        for entry in reversed(history):
            if at in (entry.tag, f"step-{_place(entry.tag)[0]}", entry.id):
                if isinstance(entry, Snapshot):
                    return entry
                raise SnapshotNotFoundError(f"{self.path}: {entry}; those that can be read: {tags or 'none'}")
        raise SnapshotNotFoundError(f"{self.path} holds no snapshot {at!r}; there are: {tags}, latest")

    def _latest(self, history: list[Snapshot | UnreadableSnapshot]) -> Snapshot:
        for entry in reversed(history):
            if isinstance(entry, Snapshot):
                return entry
            _log.warning("%s: %s; it is left out", self.path, entry)
        raise SnapshotNotFoundError(f"{self.path} holds no snapshot that can be read: {'; '.join(map(str, history))}")

    def group(self, snapshot: Snapshot) -> zarr.Group:
        """Return the arrays as they were at `snapshot`, read-only."""
        return zarr.open_group(self._repository.readonly_session(snapshot_id=snapshot.id).store, mode="r")

    def describe(self, snapshot: Snapshot) -> Description:
        """Return what the store was made for. Raises DamagedChunkError where `snapshot` does not say it legibly."""
        try:
            return Description.from_attributes(self.group(snapshot).attrs.asdict(), self.path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # icechunk keeps no checksum of attributes
            raise DamagedChunkError(
                f"{self.path}: what the snapshot {snapshot.tag} says of itself, in snapshots/{snapshot.id}, is damaged "
                f"({type(error).__name__}: {error}). Go back to an older snapshot: `thermopile state log` lists them"
            ) from error

    def undo_after(self, snapshot: Snapshot) -> None:
        """Make `snapshot` the last one: delete the tags of what came after; `retain` frees their disk.

        Raises SnapshotError where a file cannot be written; then some of what came after is still there.
        """
        # Newest first: whenever a crash comes, what is left is a history that the run has had.
        with _refusing(f"{self.path}: the snapshots after {snapshot.tag} could not be undone"):
            for tag in reversed(self._tags()):
                if _place(tag) > _place(snapshot.tag):
                    self._delete_tag(tag)

    def retain(self, keep_last: int, keep_every: int = 0) -> None:
        """Keep the newest `keep_last` snapshots, those of a step that `keep_every` divides, and step-0; free the rest.

        keep_last: at least 1. keep_every: in steps; 0 keeps none for its step. A reader of a snapshot that is kept
        goes on undisturbed. Also frees what crashes and failed commits left. Raises ValueError, SnapshotError.
        """
        if keep_last < 1 or keep_every < 0:
            raise ValueError(f"keep_last {keep_last} must be at least 1, and keep_every {keep_every} at least 0")
        with _refusing(f"{self.path}: not all of the old snapshots could be deleted"):
            for snapshot in self.snapshots()[:-keep_last]:
                due = keep_every > 0 and snapshot.step % keep_every == 0
                if snapshot.step > 0 and not due:
                    self._delete_tag(snapshot.tag)
            self._collect_garbage()

    def commit(
        self, parts: Iterable[ColumnPart], *, base: Snapshot | None, step: int, epoch: int, config_hash: str,
        dataset_fingerprint: str, ranks: Ranks,
    ) -> Snapshot:  # fmt: skip
        """Write a snapshot: `base` with the rows of all ranks' `parts` in place of its own; durable on return.

        Every rank calls it, with its own parts, which it may make as they are asked for; the rest is rank 0's to say.
        Raises SnapshotError on every rank when one fails, be it in making its parts, and then leaves nothing behind.
        """
        metadata = _metadata(step, epoch, config_hash, dataset_fingerprint)
        # Whatever fails on a rank, it still takes part in these three exchanges: the others wait for it.
        forks = ranks.broadcast(_attempt(ranks, self._fork, base, ranks.world) if ranks.rank == 0 else None)
        share = forks if isinstance(forks, _Failure) else _attempt(ranks, self._write, forks[ranks.rank], parts)
        shares = ranks.gather(share)
        outcome = ranks.broadcast(self._finish(shares, base, metadata, ranks) if ranks.rank == 0 else None)
        if isinstance(outcome, Snapshot):
            return outcome
        raise SnapshotError(
            f"{self.path}: the snapshot of step {step} was not written. {outcome.reason}"
        ) from outcome.error

    def _fork(self, base: Snapshot | None, world: int) -> list[icechunk.ForkSession]:
        """Return a session for each rank; all are made before anything is written, as icechunk wants it."""
        if base is None:
            raise ValueError("rank 0 must say which snapshot to build on")
        self._remove_writing_branch()
        self._repository.create_branch(_WRITING, base.id)
        session = self._repository.writable_session(_WRITING)
        return [session.fork() for _ in range(world)]

    def _write(self, fork: icechunk.ForkSession, parts: Iterable[ColumnPart]) -> "_Share":
        written = 0
        with disk.written_through(self.path):
            group = zarr.open_group(fork.store, mode="r+")
            columns = Description.from_attributes(group.attrs.asdict(), self.path).schema.columns
            arrays = {column: array_of(group, column) for column in columns}
            for part in parts:
                for column, values in part.columns.items():
                    arrays[column][part.start : part.start + len(values)] = values
                    written += values.nbytes
        return _Share(fork, written)

    def _finish(
        self, shares: "list[_Share | _Failure]", base: Snapshot | None, metadata: dict[str, Any], ranks: Ranks
    ) -> "Snapshot | _Failure":
        """Commit and tag what the ranks have written, or clear it away; on rank 0."""
        # Once each: the failure to begin is every rank's share.
        failures = list(dict.fromkeys(share for share in shares if isinstance(share, _Failure)))
        if not failures:
            written = [share for share in shares if isinstance(share, _Share)]
            outcome = _attempt(ranks, self._merge, written, metadata)
            if isinstance(outcome, Snapshot):
                return outcome
            failures = [outcome]
        why = self._why(failures, base)
        # What matters is why the commit failed. A chunk that zarr is still writing now is left for `retain` to collect.
        with suppress(Exception):
            self._collect_garbage()
        return _Failure(ranks.rank, why, failures[0].error)

    def _why(self, failures: "list[_Failure]", base: Snapshot | None) -> str:
        """Say why there is no new snapshot, and what to do; a base that is damaged is the reason of all others."""
        found = None
        with suppress(Exception):  # the other ranks wait for the answer
            # Opened anew: this repository may remember what has been damaged on the disk since.
            found = Repository.open(self.path)._read(base.tag) if base else None
        if isinstance(found, UnreadableSnapshot):
            return (
                f"It builds on an earlier one, but {found}. Go back to an older snapshot: `thermopile state check RUN "
                "--all` tells which are sound, open(at=…) resumes there"
            )
        return (
            "; ".join(f"rank {failure.rank}: {failure.reason}" for failure in failures) + ". The last snapshot stands"
        )

    def _merge(self, shares: "list[_Share]", metadata: dict[str, Any]) -> Snapshot:
        step = metadata["step"]
        written = sum(share.bytes_written for share in shares)
        with disk.written_through(self.path):
            session = self._repository.writable_session(_WRITING)
            session.merge(*(share.fork for share in shares))
            # icechunk refuses a commit without a change, as when every row since the last snapshot was refused.
            zarr.open_group(session.store, mode="r+").update_attributes({"step": step})
            snapshot_id = session.commit(f"state after step {step}", metadata={**metadata, "bytes_written": written})
            self._cut_off_from_ancestors()
        tag = self._create_tag(step, snapshot_id)
        self._remove_writing_branch()
        return _snapshot(self._repository.lookup_snapshot(snapshot_id), tag)

    def _cut_off_from_ancestors(self) -> None:
        """Let go of what the new snapshot builds on, which else could never be collected.

        icechunk does so by writing the snapshot's file again: now, while nobody relies on it, and never again.
        """
        try:
            self._repository.expire_snapshots(_EVERYTHING)
        except icechunk.IcechunkError:
            # icechunk looks at every snapshot. That an old one is damaged is no reason to lose this one.
            if not self.unreadable():
                raise

    def _create_tag(self, step: int, snapshot_id: str) -> str:
        """Announce a snapshot that is on the disk, under the first name of its step that is free."""
        attempt, tag = 1, f"step-{step}"
        while not self._try_tag(tag, snapshot_id):
            attempt += 1
            tag = f"step-{step}.{attempt}"
        try:
            reference = self._reference(tag)
            for path in (reference, reference.parent, reference.parent.parent):
                disk.sync(path)
        except OSError:
            self._delete_tag(tag)
            raise
        return tag

    def _try_tag(self, tag: str, snapshot_id: str) -> bool:
        try:
            self._repository.create_tag(tag, snapshot_id)
        except icechunk.IcechunkError as error:
            # A deleted tag keeps its name for ever and is not listed, so it is found out by trying.
            if "tag already exists" not in str(error):
                raise
            return False
        return True

    def _delete_tag(self, tag: str) -> None:
        self._repository.delete_tag(tag)
        disk.sync(self._reference(tag).parent)  # icechunk marks a deleted tag with a second file beside the reference

    def _reference(self, tag: str) -> Path:
        return self.path / "refs" / f"tag.{tag}" / "ref.json"

    def _tags(self) -> list[str]:
        # icechunk lists no tag that a power failure has cut short.
        return sorted(filter(_TAG.fullmatch, self._repository.list_tags()), key=_place)

    def _read(self, tag: str) -> Snapshot | UnreadableSnapshot | None:
        """Return what a tag stands for; None where the writer has deleted the tag meanwhile."""
        try:
            snapshot_id = self._repository.lookup_tag(tag)
        except icechunk.IcechunkError:
            return None
        try:
            return _snapshot(self._repository.lookup_snapshot(snapshot_id), tag)
        except icechunk.IcechunkError as error:
            # Looked for again: a tag is deleted first, and then the file that it stood for.
            return UnreadableSnapshot(tag, snapshot_id, _reason(error)) if tag in self._tags() else None

    def _remove_writing_branch(self) -> None:
        # Not by icechunk, which cannot delete a branch whose file a power failure has cut short.
        shutil.rmtree(self.path / "refs" / f"branch.{_WRITING}", ignore_errors=True)

    def _collect_garbage(self) -> None:
        """Delete what belongs to no tagged snapshot; no commit may be under way."""
        self._remove_writing_branch()
        self._repository.garbage_collect(_EVERYTHING)
        for abandoned in self.path.rglob(_ABANDONED):
            abandoned.unlink(missing_ok=True)


def list_snapshots(path: str | os.PathLike[str]) -> list[Snapshot]:
    """Return the snapshots of the store at `path`, oldest first; needs no lock.

    Raises StoreNotFoundError where there is no store.
    """
    return Repository.open(Path(path)).snapshots()


def array_of(group: zarr.Group, column: str) -> "zarr.Array[Any]":
    return cast("zarr.Array[Any]", group[column])


def _storage(path: Path) -> icechunk.Storage:
    return icechunk.local_filesystem_storage(str(path.absolute()))


def _create_arrays(store: icechunk.IcechunkStore, description: Description) -> None:
    group = zarr.create_group(store, attributes=description.to_attributes())
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


def _metadata(step: int, epoch: int, config_hash: str, dataset_fingerprint: str, **more: int) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": epoch,
        "config_hash": config_hash,
        "dataset_fingerprint": dataset_fingerprint,
        **more,
    }


def _snapshot(info: icechunk.SnapshotInfo, tag: str) -> Snapshot:
    names = ("step", "epoch", "config_hash", "dataset_fingerprint")
    return Snapshot(
        id=info.id,
        tag=tag,
        written_at=info.written_at,
        bytes_written=info.metadata.get("bytes_written", 0),  # format 1 had none, and is refused with its number later
        **{name: info.metadata[name] for name in names},
    )


def _place(tag: str) -> tuple[int, int]:
    """Return where a tag stands in the history: its step, and which attempt at that step it is."""
    step, _, attempt = tag.removeprefix("step-").partition(".")
    return int(step), int(attempt or 1)


@dataclass(frozen=True)
class _Share:
    """What one rank has written: its session with the chunks, and their size."""

    fork: icechunk.ForkSession
    bytes_written: int


@dataclass(frozen=True)
class _Failure:
    rank: int
    reason: str
    error: Exception | None = field(compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Failure, (self.rank, self.reason, None)  # between ranks the words must do: not every error pickles


def _attempt(ranks: Ranks, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | _Failure:
    try:
        return work(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 (handed on: to every rank)
        return _Failure(ranks.rank, _reason(error), error)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise SnapshotError, saying `what` did not work, for an error of the disk or of icechunk."""
    try:
        yield
    except (OSError, icechunk.IcechunkError) as error:
        raise SnapshotError(f"{what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, icechunk.IcechunkError):
        # icechunk draws a tree over many lines; at its foot is what was wrong in the first place.
        lines = str(error).strip().splitlines()
        return lines[-1].partition("`-> ")[2] or lines[0].removeprefix("x ")
    return f"{type(error).__name__}: {error}"
