"""The durable tier: an icechunk repository with one zarr array per column, and an index file that is its history."""

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Self

import icechunk
import zarr

from ..storage.bucket import Address
from ..storage.bucket_errors import without_credentials
from ..storage.place import Place, place_of
from . import errors, history, icechunk_files
from .commit import About, ColumnPart, fork, merge, write_initial_values, write_parts
from .history import History, Snapshot, UnreadableSnapshot, retained_steps
from .ranks import Ranks, agreement
from .schema import Description

_log = logging.getLogger(__name__)

if "ICECHUNK_LOG" not in os.environ:
    # icechunk warns at every open that commits to a local directory must not be concurrent; the writer lock prevents
    # this. Its repository module also raises the errors that it logs over a dozen lines. Other warnings stay enabled,
    # and a filter set by the user has precedence.
    icechunk.set_logs_filter("warn,icechunk::storage::object_store=error,icechunk::repository=off")

# An icechunk thread that has just delivered a result still returns through Python. Python ends such threads during
# shutdown, and icechunk then aborts the process, so wait until they finish.
atexit.register(time.sleep, 0.05)


class Repository:
    """The snapshots of one store.

    Caches nothing: each call reads the history from disk. Only the holder of the writer lock may call `repair`,
    `commit`, `undo_after`, `forget_damaged` and `retain`, one at a time. All methods raise StoreNotFoundError if the
    index can no longer be read, and OSError if the disk fails. In a bucket, a writer's methods raise StoreLockedError
    once another process is the writer.
    """

    def __init__(self, path: Place, writer: str | None = None) -> None:
        """Open an existing repository. Raises StoreNotFoundError if there is none that can be read.

        writer: in a bucket, the writer's name; `create` and `repair` record it in the index.
        """
        self.path, self._writer = path, writer
        self._damage_warned_of: str | None = None
        self._damaged: set[int] = set()  # steps of snapshots that commits found damaged and skipped
        self._left: set[str] = set()  # files present then: a damaged manifest no longer tells which files it needs
        self.description = self._load(by_writer=False).description

    @classmethod
    def create(
        cls, path: Place, description: Description, writer: str | None = None, carried: Iterable[ColumnPart] = ()
    ) -> Self:
        """Create a repository whose first snapshot, `step-0`, has every sample at its initial values.

        carried: initial rows taken from another run's state.
        Built next to `path` and renamed, so an interrupted creation leaves no store; in a bucket, the index comes last.
        Raises StoreExistsError if `path` is a file or a directory that is not empty, SnapshotError if writing fails.
        """
        about = {"step": 0, "epoch": 0, "config_hash": "", "dataset_fingerprint": description.dataset_fingerprint}
        with _refusing(f"{path} could not be created"):
            if path.is_taken(history.INDEX):
                raise errors.StoreExistsError(f"{path} exists already; resume that run, or choose another {path.noun}")
            with path.built() as building:
                # An interrupted creation in a bucket may have left files.
                reference = icechunk_files.REFERENCE
                left = [*icechunk_files.present_files(building)]
                building.remove([*left, reference] if (building / reference).is_present() else left)
                first = write_initial_values(building, description, about, carried)
                history.replace(building, History(description, (first,), writer))
        return cls(path, writer)

    def snapshots(self) -> list[Snapshot]:
        """Return the readable snapshots, oldest first."""
        return [entry for entry in self.history() if isinstance(entry, Snapshot)]

    def unreadable(self) -> list[UnreadableSnapshot]:
        """Return the damaged snapshots, oldest first."""
        return [entry for entry in self.history() if isinstance(entry, UnreadableSnapshot)]

    def history(self) -> list[Snapshot | UnreadableSnapshot]:
        """Return all snapshots, oldest first. Reads all their files except chunks."""
        entries = icechunk_files.for_each(self.path, self._read, self._load().snapshots)
        return [entry for entry in entries if entry is not None]

    def holds(self, snapshot_id: str) -> bool:
        """Return whether a snapshot is in the history, damaged or not."""
        return any(snapshot.id == snapshot_id for snapshot in self._load().snapshots)

    def damage(self) -> list[str]:
        """Return the damage to files shared by all snapshots: the index, its copy and the branch reference."""
        loaded, found = history.load(self.path)
        damaged = [] if found or history.copy_is_sound(self.path, loaded) else [history.COPY]
        if not icechunk_files.reference_is_sound(self.path):
            damaged.append(icechunk_files.REFERENCE)
        lines = [f"{self.path}: {file} is damaged or missing; resuming the run rewrites it" for file in damaged]
        return [found, *lines] if found else lines

    def resolve(self, at: str) -> Snapshot:
        """Return the snapshot for `at`: `latest`, a tag `step-N`, or a snapshot id.

        `latest` skips damaged snapshots with a warning. Raises SnapshotNotFoundError, which lists the existing tags or
        names the damaged file of the requested snapshot.
        """
        unreadable: list[UnreadableSnapshot] = []
        for snapshot in reversed(self._load().snapshots):
            if at not in (snapshot.tag, snapshot.id, "latest"):
                continue
            if isinstance(entry := self._read(snapshot), Snapshot):
                return entry
            if entry is not None:
                unreadable.append(entry)
                if at == "latest":
                    _log.warning("%s: %s; skipping it", self.path, entry)
        tags = ", ".join(entry.tag for entry in self.snapshots())
        if unreadable:
            damage = "; ".join(map(str, unreadable))
            raise errors.SnapshotNotFoundError(f"{self.path}: {damage}; readable snapshots: {tags or 'none'}")
        raise errors.SnapshotNotFoundError(f"{self.path} has no snapshot {at!r}; available: {tags}, latest")

    def group(self, snapshot: Snapshot) -> zarr.Group:
        """Return the arrays of `snapshot`, read-only.

        Raises SnapshotNotFoundError if it is damaged or has been deleted, DamagedChunkError if a chunk is not a regular
        file, SnapshotError if icechunk cannot open it although its files are intact.
        """
        if not isinstance(entry := self._read(snapshot), Snapshot):
            why = entry or f"{snapshot.tag} was deleted; read a later one"
            raise errors.SnapshotNotFoundError(f"{self.path}: {why}")
        icechunk_files.refuse_pipes(self.path)
        with _refusing(f"{self.path}: {snapshot.tag} could not be opened"):
            session = icechunk_files.open_repository(self.path).readonly_session(snapshot_id=snapshot.id)
            return zarr.open_group(session.store, mode="r")

    def repair(self) -> None:
        """Rewrite the index, its copy and icechunk's reference if any of them is damaged. Raises SnapshotError.

        In a bucket, the index then names this writer, and an earlier writer can no longer replace it.
        """
        with _refusing(f"{self.path}: the state could not be prepared for writing"):
            icechunk_files.refuse_links(self.path)
            if self.damage() or self._writer is not None:
                loaded, _ = history.load(self.path)
                try:
                    history.replace(self.path, replace(loaded, writer=self._writer))
                # An earlier writer's late request, or the lock is lost, as load() reports.
                except errors.StoreLockedError:
                    return self.repair()
                icechunk_files.point_reference_at(self.path, loaded.snapshots[-1].id)

    def undo_after(self, snapshot: Snapshot) -> None:
        """Drop all snapshots after `snapshot` from the history; `retain` frees their disk space later.

        Raises SnapshotError if the index cannot be replaced.
        """
        with _refusing(f"{self.path}: the snapshots after {snapshot.tag} could not be undone"):
            loaded = self._load()
            if loaded.snapshots[-1].step > snapshot.step:
                self._replace(loaded, [entry for entry in loaded.snapshots if entry.step <= snapshot.step])

    def forget_damaged(self) -> None:
        """Drop damaged snapshots before the newest one from the history, with a warning each.

        A single one would make every `retain` fail, until the disk is full. Call it only when a run resumes: until then
        a lost file could be restored. Chunks are not read. Does nothing if the newest snapshot is damaged. Raises
        SnapshotError if the disk fails or the index cannot be replaced.
        """
        with _refusing(f"{self.path}: the damaged snapshots could not be dropped from the history"):
            loaded = self._load()
            present = icechunk_files.present_files(self.path)
            found = {snapshot.tag: self._damage_of(snapshot, present) for snapshot in loaded.snapshots}
            damaged = {tag: error for tag, error in found.items() if error}
            if not damaged or loaded.snapshots[-1].tag in damaged:
                return
            self._replace(loaded, [snapshot for snapshot in loaded.snapshots if snapshot.tag not in damaged])
        dropped = (
            "%s: snapshot %s is damaged (%s). The run continues without it: it was dropped from the history; its files "
            "will be deleted with the next old snapshots"
        )
        for tag, error in damaged.items():
            _log.warning(dropped, self.path, tag, error)

    def retain(self, keep_last: int, keep_every: int = 0, keep_early: int = 0) -> None:
        """Keep the newest `keep_last` snapshots, multiples of `keep_every`, early ones, and step-0.

        keep_last: at least 1. keep_every: in steps; 0 disables. keep_early: as in `early_steps`. Also deletes leftovers
        of crashes and failed commits. Readers of a kept snapshot are not disturbed. Before deleting, verifies all
        kept files except chunks. Snapshots that a commit found damaged stay, uncounted. Raises SnapshotError.
        """
        with _refusing(f"{self.path}: not all old snapshots were deleted"):
            loaded = self._load()
            intact = [snapshot.step for snapshot in loaded.snapshots if snapshot.step not in self._damaged]
            kept = {0, *self._damaged} | retained_steps(intact, keep_last, keep_every, keep_early)
            self._free_all_but(loaded, [snapshot for snapshot in loaded.snapshots if snapshot.step in kept])

    def _free_all_but(self, loaded: History, kept: Sequence[Snapshot]) -> None:
        """Make `kept` the history and delete all files that it does not need. No commit may be in progress."""
        icechunk_files.refuse_links(self.path)
        intact = (snapshot.files for snapshot in kept if snapshot.step not in self._damaged)
        unneeded = icechunk_files.find_garbage(self.path, intact, self._left)
        # After the listing, which then has no files of a later writer: if there is a later writer, this raises.
        if len(kept) < len(loaded.snapshots):
            self._replace(loaded, kept)
        else:
            self._load()
        self.path.remove(unneeded)

    def _replace(self, loaded: History, snapshots: Iterable[Snapshot]) -> None:
        icechunk_files.refuse_links(self.path)
        history.replace(self.path, replace(loaded, snapshots=tuple(snapshots)))

    def commit(
        self, parts: Callable[[Snapshot], Iterable[ColumnPart]], *, base: Snapshot, about: About, ranks: Ranks
    ) -> Snapshot:
        """Write a snapshot on `base`, or on the newest intact one before it, with all ranks' parts; durable on return.

        parts: given the snapshot to build on, returns this rank's changes. Skips damaged snapshots, with a warning
        each. Drops snapshots after `base`, left by a failed announcement: the new snapshot becomes the last. Every rank
        calls this with its own parts; the other arguments count on rank 0 only. If a rank fails, even while making its
        parts, all ranks raise SnapshotError and nothing is left behind.
        """

        @contextmanager
        def stage() -> Iterator[None]:
            what = f"{self.path}: the snapshot of step {about['step']}, which builds on {base.tag}, was not written"
            with agreement(ranks, errors.SnapshotError), _refusing(what, (Exception,)):
                yield

        forked, snapshot = None, None
        try:  # exchanges stand between the stages: a rank that failed alone would leave the others waiting
            with stage():
                if ranks.rank == 0:
                    forked = self._fork(base, ranks.world)
            base, forks = ranks.broadcast(forked)
            with stage():
                share = write_parts(self.path, forks[ranks.rank], self.description.schema.columns, parts(base))
            shares = ranks.gather(share)
            with stage():
                if ranks.rank == 0:
                    snapshot = merge(self.path, shares, base, about)
                    self._announce(snapshot, base)
        except errors.SnapshotError:
            if ranks.rank == 0:
                # Report the commit's failure, not this cleanup's. `retain` collects any chunk that zarr still writes.
                with suppress(Exception):
                    loaded = self._load()
                    self._free_all_but(loaded, loaded.snapshots)
            raise
        written: Snapshot = ranks.broadcast(snapshot)
        return written

    def _fork(self, newest: Snapshot, world: int) -> tuple[Snapshot, list[icechunk.ForkSession]]:
        """Return `newest` or the newest intact snapshot before it, and a session on it for each rank.

        Raises DamagedFileError if no snapshot is intact.
        """
        earlier = [snapshot for snapshot in self._load().snapshots if snapshot.step <= newest.step]
        present, damaged = icechunk_files.present_files(self.path), dict[int, errors.DamagedFileError]()
        for base in reversed(earlier):
            if (error := self._damage_of(base, present)) is None:
                break
            damaged[base.step] = error
        else:
            raise damaged[newest.step]
        skipped = (
            "%s: snapshot step-%d is damaged (%s). The next one builds on %s and holds all changes since then. The "
            "damaged one is left until the run is resumed, which drops it; check the disk"
        )
        for step in damaged.keys() - self._damaged:
            _log.warning(skipped, self.path, step, damaged[step], base.tag)
            self._damaged.add(step)
            self._left |= present
        return base, fork(self.path, base, world)

    def _damage_of(self, snapshot: Snapshot, present: Set[str]) -> errors.DamagedFileError | None:
        """Return the damage to a snapshot's files; of chunks, only whether they are there. present: `present_files`."""
        try:
            icechunk_files.needed_files(self.path, [snapshot.files], present)
        except errors.DamagedFileError as error:
            return error
        return None

    def _announce(self, snapshot: Snapshot, base: Snapshot) -> None:
        loaded = self._load()
        try:
            kept = [entry for entry in loaded.snapshots if entry.step <= base.step or entry.step in self._damaged]
            self._replace(loaded, [*kept, snapshot])
        except OSError:
            if not self.path.is_remote:
                with suppress(OSError):  # the rename may have succeeded, and only the flush failed
                    history.replace(self.path, loaded)
            raise

    def _load(self, *, by_writer: bool = True) -> History:
        loaded, damage = history.load(self.path)
        if by_writer and self._writer is not None and loaded.writer != self._writer:
            raise history.taken_over(self.path)
        if damage and damage != self._damage_warned_of:
            _log.warning("%s", damage)
            self._damage_warned_of = damage
        return loaded

    def _read(self, snapshot: Snapshot) -> Snapshot | UnreadableSnapshot | None:
        """Return the snapshot if its files, except chunks, are intact; None if it was deleted."""
        try:
            for name, sha256 in snapshot.files.items():
                icechunk_files.verified(self.path, name, sha256)
        except errors.DamagedFileError as error:
            # Check again: a snapshot leaves the index before its files are deleted.
            if not self.holds(snapshot.id):
                return None
            return UnreadableSnapshot(snapshot.tag, snapshot.id, error.file, error.reason)
        return snapshot


def list_snapshots(path: str | os.PathLike[str] | Address) -> list[Snapshot]:
    """Return the snapshots of the store at `path`, oldest first. Needs no lock.

    Raises StoreNotFoundError if there is no store.
    """
    return Repository(place_of(path)).snapshots()


@contextmanager
def _refusing(what: str, kinds: tuple[type[Exception], ...] = (OSError, icechunk.IcechunkError)) -> Iterator[None]:
    """Raise SnapshotError, saying that `what` failed, for damaged files and errors of these kinds (disk, icechunk)."""
    try:
        yield
    except (errors.StoreLockedError, errors.StoreExistsError):
        raise
    except errors.DamagedFileError as error:
        raise errors.SnapshotError(
            f"{what}: {error}. Stop the run, restore the file from a copy of the run, and resume. Without a copy, "
            "resume anyway: that drops the damaged snapshots, which `thermopile state check RUN --all` lists"
        ) from error
    except kinds as error:
        reason = str(error) if isinstance(error, errors.StateStoreError) else f"{type(error).__name__}: {error}"
        if isinstance(error, icechunk.IcechunkError):
            # icechunk formats the error as a tree over several lines; the last line is the root cause.
            lines = str(error).strip().splitlines()
            reason = without_credentials(lines[-1].partition("`-> ")[2] or lines[0].removeprefix("x "))
        raise errors.SnapshotError(f"{what}: {reason}") from error
