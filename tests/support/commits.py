"""Snapshots of a small repository, committed without a store."""

import icechunk
import numpy as np

from thermopile.state_store.commit import ColumnPart, array_of
from thermopile.state_store.ranks import Ranks
from thermopile.state_store.schema import Schema

ALONE = Ranks()
SCHEMA = Schema({"image/log_s": -np.inf, "image/tau": 0.05})

# A chunk of 1 KB: icechunk keeps those of up to 512 B in its manifests.
SAMPLES, BLOCK_ROWS = 1_000, 256

CHANGED_BYTES = SAMPLES * 4 * 4


def rows(value, start=0, stop=SAMPLES):
    """Every column of the rows start … stop − 1, all of one value."""
    return ColumnPart(start, {name: np.full(stop - start, value, SCHEMA.dtype(name)) for name in SCHEMA.columns})


def commit(repository, step, parts=None, *, base=None, ranks=ALONE, **changes):
    """Commit a snapshot on top of the last one; by default all rows are set to the number of the step."""
    made_for = repository.description
    if parts is None:
        names = made_for.schema.columns
        parts = [ColumnPart(0, {name: np.full(made_for.samples, step, made_for.schema.dtype(name)) for name in names})]
    about = {"step": step, "epoch": 0, "config_hash": "", "dataset_fingerprint": made_for.dataset_fingerprint} | changes
    return repository.commit(lambda _: parts, base=base or repository.resolve("latest"), about=about, ranks=ranks)


def columns(repository, at="latest"):
    group = repository.group(repository.resolve(at))
    return {name: array_of(group, name)[:] for name in SCHEMA.columns}


def assert_all_rows(repository, at, value):
    for name, column in columns(repository, at).items():
        np.testing.assert_array_equal(column, np.full(SAMPLES, value, column.dtype), err_msg=f"{name} at {at}")


def tags(repository):
    return [snapshot.tag for snapshot in repository.snapshots()]


def disk_use(path):
    return sum(entry.lstat().st_blocks * 512 for entry in path.rglob("*"))


def files(path):
    return {entry.relative_to(path) for entry in path.rglob("*") if entry.is_file()}


def icechunk_repository(path):
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(path)))
