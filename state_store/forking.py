"""Make a store of one snapshot of another, which may be in use, without writing again what need not be written."""

from collections.abc import Callable
from dataclasses import replace

from ..storage.place import Place, duplicate
from . import history, icechunk_files
from .check import check_snapshot
from .errors import SnapshotError, SnapshotNotFoundError
from .reader import StateReader


def fork_state(source: Place, to: Place, snapshot_id: str, writer: str | None) -> None:
    """Make the store `to` with the initial snapshot of another store and this one.

    Chunks, manifests and snapshots are linked where they can be: icechunk changes none of them in place, and removing
    one removes a name. The index, its copy and the branch reference, which are replaced, are written anew. writer: in a
    bucket, the lock's. Raises SnapshotNotFoundError, DamagedFileError, also if the other store's writer removes the
    snapshot meanwhile; OSError.
    """
    loaded, _ = history.load(source)
    kept = tuple(snapshot for snapshot in loaded.snapshots if snapshot.step == 0 or snapshot.id == snapshot_id)
    if not kept or kept[-1].id != snapshot_id:
        raise SnapshotNotFoundError(f"{source} has no snapshot {snapshot_id}; fork the run at another checkpoint")
    needed = icechunk_files.needed_files(
        source, [snapshot.files for snapshot in kept], icechunk_files.present_files(source)
    )
    for folder in {name.partition("/")[0] for name in (*needed, icechunk_files.REFERENCE)}:
        (to / folder).make()
    (to / icechunk_files.REFERENCE).parent.make()

    def take(name: str) -> None:
        with icechunk_files.damage_to(name):
            duplicate(source / name, to / name)

    for _ in icechunk_files.for_each(source if source.is_remote else to, take, sorted(needed)):
        pass
    icechunk_files.point_reference_at(to, snapshot_id)
    history.replace(to, replace(loaded, snapshots=kept, writer=writer, version=None))


def read_back(state: Place, on_progress: Callable[[int], None] = lambda rows: None) -> None:
    """Read every chunk of every snapshot. Raises SnapshotError for the first fault, SelectionError, OSError."""
    for snapshot in history.load(state)[0].snapshots:
        report = check_snapshot(StateReader.open(state, snapshot.id), {}, on_progress)
        faults = [*report.other_problems, *(problem.what for column in report.columns for problem in column.problems)]
        if faults:
            raise SnapshotError(f"{state}: {snapshot.tag} is damaged: {faults[0]}")
