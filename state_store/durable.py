"""The durable tier: one zarr array a column in an icechunk repository, and an index that is its history.

Nothing that a reader or a resumed run relies on is ever written twice but the index, which is replaced once all that it
names is on the disk: no crash, not even a power failure, can leave half a snapshot.
"""

import atexit
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import icechunk
import zarr

from ..files import refuse_link
from . import disk, garbage, history, icechunk_files
from .commit import (
    ColumnPart,
    Failure,
    Label,
    Share,
    array_of,
    attempt,
    fork,
    merge,
    reason_of,
    write_initial_values,
    write_parts,
)
from .description import Description
from .errors import DamagedFileError, SnapshotError, SnapshotNotFoundError, StoreExistsError
from .history import History, Snapshot, UnreadableSnapshot
from .ranks import Ranks

__all__ = ["ColumnPart", "Description", "Repository", "Snapshot", "UnreadableSnapshot", "array_of", "list_snapshots"]

_log = logging.getLogger(__name__)

if "ICECHUNK_LOG" not in os.environ:
    # icechunk warns at every open that commits to a local directory must not be concurrent; the writer lock sees to
    # that. Its other warnings stay, and so does a filter of the user's own.
    icechunk.set_logs_filter("warn,icechunk::storage::object_store=error")

# A thread of icechunk that has just handed over a result still has to return through Python. Python ends such a thread
# when it shuts down, and icechunk then aborts the whole process. So it is let through first.
atexit.register(time.sleep, 0.05)


class Repository:
    """The snapshots of one store.

    Nothing of the history is remembered: each call reads what is on the disk. Writing (`repair`, `commit`,
    `undo_after`, `forget_damaged`, `retain`) is for the holder of the writer lock alone, one call at a time. All raise
    StoreNotFoundError where the index cannot be read any more, and OSError where the disk cannot tell.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._damage_told: str | None = None
        self.description = self._load().description

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
        path.parent.mkdir(parents=True, exist_ok=True)
        with _refusing(f"{path} could not be made"):
            refuse_link(path)
            refuse_link(building)
            shutil.rmtree(building, ignore_errors=True)
            first = write_initial_values(building, description, Label(0, 0, "", description.dataset_fingerprint))
            history.replace(building, History(description, (first,)))
            building.rename(path)
            disk.sync(path.parent)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Repository":
        """Open an existing repository; raises StoreNotFoundError where there is none that can be read."""
        return cls(path)

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots of the run's history that can be read, oldest first."""
        return [entry for entry in self.history() if isinstance(entry, Snapshot)]

    def unreadable(self) -> list[UnreadableSnapshot]:
        """Return the snapshots of the run's history that are damaged, oldest first."""
        return [entry for entry in self.history() if isinstance(entry, UnreadableSnapshot)]

    def history(self) -> list[Snapshot | UnreadableSnapshot]:
        """Return all snapshots of the run's history, oldest first; all of their files but the chunks are read."""
        entries = map(self._read, self._load().snapshots)
        return [entry for entry in entries if entry is not None]

    def holds(self, snapshot_id: str) -> bool:
        """Say whether a snapshot is in the history, damaged or not."""
        return any(snapshot.id == snapshot_id for snapshot in self._load().snapshots)

    def damage(self) -> list[str]:
        """Return what is wrong with the files that belong to no snapshot: the index, its copy, the reference."""
        loaded, found = history.load(self.path)
        problems = [found] if found else []
        if not found and not history.copy_is_sound(self.path, loaded):
            problems.append(f"{self.path}: {history.COPY} is damaged or missing; resuming the run writes it again")
        if not icechunk_files.reference_is_sound(self.path):
            problems.append(
                f"{self.path}: {icechunk_files.REFERENCE} is damaged or missing; resuming the run writes it again"
            )
        return problems

    def resolve(self, at: str) -> Snapshot:
        """Return the snapshot that `at` names: `latest`, a tag, `step-N`, or a snapshot id.

        `latest` passes over snapshots that cannot be read, with a warning in the log. Raises SnapshotNotFoundError that
        lists the tags there are, or names the damaged file of the snapshot asked for.
        """
        if at == "latest":
            return self._latest()
        for snapshot in self._load().snapshots:
            if at not in (snapshot.tag, snapshot.id):
                continue
            if isinstance(entry := self._read(snapshot), Snapshot):
                return entry
            if entry is not None:
                readable = ", ".join(found.tag for found in self.snapshots())
                raise SnapshotNotFoundError(f"{self.path}: {entry}; those that can be read: {readable or 'none'}")
        tags = ", ".join(entry.tag for entry in self.snapshots())
        raise SnapshotNotFoundError(f"{self.path} holds no snapshot {at!r}; there are: {tags}, latest")

    def _latest(self) -> Snapshot:
        entries = self.history()
        for entry in reversed(entries):
            if isinstance(entry, Snapshot):
                return entry
            _log.warning("%s: %s; it is left out", self.path, entry)
        raise SnapshotNotFoundError(f"{self.path} holds no snapshot that can be read: {'; '.join(map(str, entries))}")

    def group(self, snapshot: Snapshot) -> zarr.Group:
        """Return the arrays as they were at `snapshot`, read-only.

        Raises SnapshotNotFoundError where it is damaged or was deleted meanwhile, DamagedChunkError for a chunk that is
        no file, SnapshotError where icechunk cannot open it though its files are what was written.
        """
        if not isinstance(entry := self._read(snapshot), Snapshot):
            raise SnapshotNotFoundError(f"{self.path}: {entry or f'{snapshot.tag} was deleted; read a later one'}")
        icechunk_files.refuse_pipes(self.path)
        with _refusing(f"{self.path}: {snapshot.tag} could not be opened"):
            session = icechunk_files.open_repository(self.path).readonly_session(snapshot_id=snapshot.id)
            return zarr.open_group(session.store, mode="r")

    def repair(self) -> None:
        """Write again what of the index, its copy and icechunk's reference is damaged. Raises SnapshotError."""
        with _refusing(f"{self.path}: the state could not be made ready for writing"):
            icechunk_files.refuse_links(self.path)
            loaded, found = history.load(self.path)
            if found or not history.copy_is_sound(self.path, loaded):
                history.replace(self.path, loaded)
            if not icechunk_files.reference_is_sound(self.path):
                icechunk_files.point_reference_at(self.path, loaded.snapshots[-1].id)

    def undo_after(self, snapshot: Snapshot) -> None:
        """Make `snapshot` the last one; `retain` frees the disk of what came after.

        Raises SnapshotError where the index cannot be replaced.
        """
        loaded = self._load()
        with _refusing(f"{self.path}: the snapshots after {snapshot.tag} could not be undone"):
            if later := [entry for entry in loaded.snapshots if entry.step > snapshot.step]:
                icechunk_files.refuse_links(self.path)
                history.replace(self.path, replace(loaded, snapshots=loaded.snapshots[: -len(later)]))

    def forget_damaged(self) -> None:
        """Take the damaged snapshots before the last one out of the history, with a warning that names each.

        One that is kept for its step would make every `retain` fail, so that the disk fills up. This is for a run that
        resumes, before which a lost file could be put back. Chunks are not read. Does nothing where the last snapshot
        is damaged as well. Raises SnapshotError where the disk cannot tell or the index cannot be replaced.
        """
        with _refusing(f"{self.path}: the damaged snapshots could not be forgotten"):
            loaded = self._load()
            if len(loaded.snapshots) == 1:
                return
            damaged = list(garbage.find_damaged(self.path, loaded.snapshots))
            forgotten = [snapshot for snapshot, _ in damaged]
            if not damaged or loaded.snapshots[-1] in forgotten:
                return
            icechunk_files.refuse_links(self.path)
            sound = tuple(snapshot for snapshot in loaded.snapshots if snapshot not in forgotten)
            history.replace(self.path, replace(loaded, snapshots=sound))
        for snapshot, error in damaged:
            _log.warning(
                "%s: the snapshot %s is damaged (%s). The run goes on without it: it is out of the history, and its "
                "files are deleted with the next old ones", self.path, snapshot.tag, error,
            )  # fmt: skip

    def retain(self, keep_last: int, keep_every: int = 0) -> None:
        """Keep the newest `keep_last` snapshots, those of a step that `keep_every` divides, and step-0; free the rest.

        keep_last: at least 1. keep_every: in steps; 0 keeps none for its step. A reader of a snapshot that is kept
        goes on undisturbed. Also frees what crashes and failed commits left. Nothing is deleted before all files of
        what is kept, but for the chunks, were read and are what was written. Raises ValueError, SnapshotError.
        """
        if keep_last < 1 or keep_every < 0:
            raise ValueError(f"keep_last {keep_last} must be at least 1, and keep_every {keep_every} at least 0")
        with _refusing(f"{self.path}: nothing was deleted, or not all of the old snapshots"):
            loaded = self._load()
            newest = loaded.snapshots[-keep_last:]
            kept = tuple(
                snapshot
                for snapshot in loaded.snapshots
                if snapshot in newest or snapshot.step == 0 or (keep_every and snapshot.step % keep_every == 0)
            )
            self._free_all_but(replace(loaded, snapshots=kept), loaded)

    def _free_all_but(self, kept: History, loaded: History) -> None:
        """Make `kept` the history, and delete all that it does not need; no commit may be under way."""
        icechunk_files.refuse_links(self.path)
        unneeded = garbage.find_garbage(self.path, kept.snapshots)
        if kept != loaded:
            history.replace(self.path, kept)
        garbage.delete(unneeded)

    def commit(
        self, parts: Iterable[ColumnPart], *, base: Snapshot | None, step: int, epoch: int, config_hash: str,
        dataset_fingerprint: str, ranks: Ranks,
    ) -> Snapshot:  # fmt: skip
        """Write a snapshot: `base` with the rows of all ranks' `parts` in place of its own; durable on return.

        It is the last one from then on: snapshots after its base, which only an announcement that failed may have
        left, are no more. Every rank calls it, with its own parts, which it may make as they are asked for;
        the rest is rank 0's to say.
        Raises SnapshotError on every rank when one fails, be it in making its parts, and then leaves nothing behind.
        """
        label = Label(step, epoch, config_hash, dataset_fingerprint)
        columns = self.description.schema.columns
        # Whatever fails on a rank, it still takes part in these three exchanges: the others wait for it.
        forks = ranks.broadcast(attempt(ranks, fork, self.path, base, ranks.world) if ranks.rank == 0 else None)
        share = (
            forks
            if isinstance(forks, Failure)
            else attempt(ranks, write_parts, self.path, forks[ranks.rank], columns, parts)
        )
        shares = ranks.gather(share)
        outcome = ranks.broadcast(self._finish(shares, base, label, ranks) if ranks.rank == 0 else None)
        if isinstance(outcome, Snapshot):
            return outcome
        raise SnapshotError(
            f"{self.path}: the snapshot of step {step} was not written. {outcome.reason}"
        ) from outcome.error

    def _finish(
        self, shares: list[Share | Failure], base: Snapshot | None, label: Label, ranks: Ranks
    ) -> Snapshot | Failure:
        """Commit and announce what the ranks have written, or clear it away; on rank 0."""
        # Once each: the failure to begin is every rank's share.
        failures = list(dict.fromkeys(share for share in shares if isinstance(share, Failure)))
        if not failures:
            assert base is not None, "a fork was made without a base"
            written = [share for share in shares if isinstance(share, Share)]
            outcome = attempt(ranks, self._merge_and_announce, written, base, label)
            if isinstance(outcome, Snapshot):
                return outcome
            failures = [outcome]
        # What matters is why the commit failed. A chunk that zarr is still writing now is left for `retain` to collect.
        with suppress(Exception):
            loaded = self._load()
            self._free_all_but(loaded, loaded)
        return Failure(ranks.rank, _why(failures), failures[0].error)

    def _merge_and_announce(self, shares: list[Share], base: Snapshot, label: Label) -> Snapshot:
        snapshot = merge(self.path, shares, base, label)
        loaded = self._load()
        before = tuple(entry for entry in loaded.snapshots if entry.step <= base.step)
        try:
            history.replace(self.path, replace(loaded, snapshots=(*before, snapshot)))
        except OSError:
            with suppress(OSError):  # it may have taken its place, and only not have been flushed
                history.replace(self.path, loaded)
            raise
        return snapshot

    def _load(self) -> History:
        loaded, damage = history.load(self.path)
        if damage and damage != self._damage_told:
            _log.warning("%s", damage)
            self._damage_told = damage
        return loaded

    def _read(self, snapshot: Snapshot) -> Snapshot | UnreadableSnapshot | None:
        """Return the snapshot where its files but the chunks are what was written; None where it was deleted."""
        try:
            icechunk_files.verify(self.path, snapshot.files)
        except DamagedFileError as error:
            # Looked for again: a snapshot leaves the index first, and then its files are deleted.
            if not self.holds(snapshot.id):
                return None
            return UnreadableSnapshot(snapshot.tag, snapshot.id, error.file, error.reason)
        return snapshot


def list_snapshots(path: str | os.PathLike[str]) -> list[Snapshot]:
    """Return the snapshots of the store at `path`, oldest first; needs no lock.

    Raises StoreNotFoundError where there is no store.
    """
    return Repository.open(Path(path)).snapshots()


def _why(failures: list[Failure]) -> str:
    if isinstance(failures[0].error, SnapshotError):
        return failures[0].reason  # what it builds on is damaged, and the reason of all else
    return "; ".join(f"rank {failure.rank}: {failure.reason}" for failure in failures) + ". The last snapshot stands"


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise SnapshotError, saying `what` did not work, for an error of the disk, of a file or of icechunk."""
    try:
        yield
    except DamagedFileError as error:
        raise SnapshotError(
            f"{what}: {error}. Stop the run, put the file back from a copy of the run and resume. Without a copy, "
            "resume it as well: it forgets the damaged snapshots, which `thermopile state check RUN --all` lists"
        ) from error
    except (OSError, icechunk.IcechunkError) as error:
        raise SnapshotError(f"{what}: {reason_of(error)}") from error
