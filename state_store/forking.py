"""Make a store of one snapshot of another, which may be in use, without writing again what need not be written."""

from dataclasses import replace

from ..storage.place import Place, duplicate
from . import history, icechunk_files
from .check import check_snapshot
from .errors import SnapshotError, SnapshotNotFoundError
from .reader import StateReader


def fork_state(source: Place, to: Place, snapshot_id: str, writer: str | None) -> None:
    """Make the store `to` with a snapshot of another store, and its initial one, and read back every chunk.

    Chunks, manifests and snapshots are linked where they can be: they are never changed in place, and whoever removes
    one removes a name. What is replaced is written anew: index, copy, branch reference. writer: the lock's in a bucket.
    Raises SnapshotNotFoundError, DamagedFileError, SnapshotError, OSError.
    """
    loaded, _ = history.load(source)
    kept = tuple(snapshot for snapshot in loaded.snapshots if snapshot.step == 0 or snapshot.id == snapshot_id)
    if snapshot_id not in (snapshot.id for snapshot in kept):
        raise SnapshotNotFoundError(f"{source} has no snapshot {snapshot_id}; fork the run at another checkpoint")
    present = icechunk_files.present_files(source)
    needed = sorted(icechunk_files.needed_files(source, [snapshot.files for snapshot in kept], present))
    for name in {name.rpartition("/")[0] for name in (*needed, icechunk_files.REFERENCE)}:
        (to / name).make()

    def take(name: str) -> None:
        with icechunk_files.damage_to(name):
            duplicate(source / name, to / name)

    list(icechunk_files.for_each(source if source.is_remote else to, take, needed))
    icechunk_files.point_reference_at(to, snapshot_id)
    history.replace(to, replace(loaded, snapshots=kept, writer=writer, version=None))
    for snapshot in kept:
        report = check_snapshot(StateReader.open(to, snapshot.id), {}, lambda rows: None)
        faults = [*report.other_problems, *(problem.what for column in report.columns for problem in column.problems)]
        if faults:
            raise SnapshotError(f"{source}: {snapshot.tag} is damaged: {faults[0]}")
