"""A power failure keeps what was synced, and of the rest whatever it likes: here it may come before any sync."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import icechunk
import pytest

from thermopile.state_store.durable import Repository
from thermopile.state_store.errors import StoreNotFoundError
from thermopile.state_store.schema import Description, Schema
from thermopile.storage import files
from thermopile.storage.files import writer_name

from support.commits import commit

SCHEMA = Schema({"image/tau": 0.0})
# Chunks of 1 KB: icechunk keeps those of up to 512 B in its manifests.
SAMPLES, BLOCK_ROWS = 500, 256


def steps(repository):
    """Read every snapshot through, and return their steps."""
    snapshots = repository.snapshots()
    for snapshot in snapshots:
        for name in SCHEMA.columns:
            assert (repository.group(snapshot)[name][:] == snapshot.step).all(), f"{name} at {snapshot.tag}"
    return {snapshot.step for snapshot in snapshots}


class Disk:
    """Knows what of a directory tree is certain to outlive a power failure, from the syncs that it is told of."""

    def __init__(self, root):
        self.root = root
        self.names = {}  # of a synced directory, by its inode: name -> inode
        self.contents = {}  # of a synced file, by its inode
        self.sync_all()

    def sync(self, path):
        if path.is_dir():
            self.names[_inode(path)] = {entry.name: _inode(entry) for entry in path.iterdir()}
        else:
            self.contents[_inode(path)] = path.read_bytes()

    def sync_all(self):
        for path in [self.root, *self.root.rglob("*")]:
            self.sync(path)

    def outcomes(self):
        """Return the worst that may be left: trees of {path: content}, None for a directory."""
        synced = self._synced(_inode(self.root), Path())
        now = {path.relative_to(self.root): path for path in self.root.rglob("*")}
        cut_short = {
            name: None if path.is_dir() else self.contents.get(_inode(path), b"") for name, path in now.items()
        }
        return {
            "nothing but what was synced": synced,
            "all names, but only the contents that were synced": cut_short,
            "what was synced, less what is deleted since": {k: v for k, v in synced.items() if k in now},
        }

    def _synced(self, directory, path):
        tree = {}
        for name, inode in self.names.get(directory, {}).items():
            is_directory = inode[0] == "directory"
            tree[path / name] = None if is_directory else self.contents.get(inode, b"")
            if is_directory:
                tree |= self._synced(inode, path / name)
        return tree


def _inode(path):
    stat = path.lstat()
    # The time tells a file from an earlier one whose inode it has been given; a new name leaves it as it is.
    return ("directory", stat.st_ino) if path.is_dir() else ("file", stat.st_ino, stat.st_mtime_ns)


class PowerFailures:
    """Before and after whatever reaches the disk, checks what a power failure at that moment would leave.

    announced: steps that must then be there, whole; none before the store was created. log: what happened.
    """

    def __init__(self, root, elsewhere):
        self.disk, self.elsewhere = Disk(root), elsewhere
        self.announced, self.log = None, []
        self.tried, self.trying, self.checking = set(), True, False

    def happens(self, what, path=None):
        if self.checking:
            return
        self.log.append(what if path is None else f"{what} {path.relative_to(self.disk.root)}")
        self.checking = True
        for loss, tree in self.disk.outcomes().items() if self.trying else ():
            self.check(tree, f"{self.log[-1]}, {loss}")
        self.checking = False

    def check(self, tree, moment):
        key = (frozenset(tree.items()), frozenset(self.announced or ()))
        if key in self.tried:
            return
        self.tried.add(key)
        shutil.rmtree(self.elsewhere, ignore_errors=True)
        for name, content in sorted({Path(): None, **tree}.items()):
            path = self.elsewhere / name
            path.mkdir() if content is None else path.write_bytes(content)
        try:
            repository = Repository(self.elsewhere / "run" / "state")
            assert steps(repository) >= (self.announced or {0}), moment
            repository.repair()  # as the store does that goes on
            last = repository.snapshots()[-1].step
            commit(repository, last + 1)
            repository.retain(2)
            assert [snapshot.step for snapshot in repository.snapshots()] == sorted({0, last, last + 1}), moment
        except StoreNotFoundError:
            assert self.announced is None, moment


@pytest.fixture
def power(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    failures = PowerFailures(tmp_path / "disk", tmp_path / "left")

    def watch(owner, name, path_of=lambda *arguments: None, after=lambda *arguments: None):
        original = getattr(owner, name)

        def watched(*arguments, **settings):
            if failures.checking:
                return None if owner in (files, os) else original(*arguments, **settings)
            path = path_of(*arguments)
            failures.happens(name, path)
            result = original(*arguments, **settings)
            after(*arguments)
            failures.happens(f"{name} done", path)
            return result

        monkeypatch.setattr(owner, name, watched)

    def opened(descriptor):
        return Path(f"/proc/self/fd/{descriptor}").readlink()

    watch(os, "fsync", opened, lambda descriptor: failures.disk.sync(opened(descriptor)))
    watch(files, "sync_file_system", after=lambda descriptor: failures.disk.sync_all())
    watch(icechunk.Session, "flush")
    for method in ("rename", "replace", "unlink"):
        watch(Path, method, lambda path, *_arguments: path)
    return failures


@pytest.mark.wide
def test_a_power_failure_leaves_every_announced_snapshot_and_no_broken_one(power, tmp_path):
    repository = Repository.create(tmp_path / "disk" / "run" / "state", Description(SAMPLES, SCHEMA, BLOCK_ROWS, "g"))
    power.announced = {0}
    for step in (1, 2):
        commit(repository, step)
        power.announced.add(step)
    power.announced = {0, 1}
    repository.undo_after(repository.resolve("step-1"))
    assert steps(repository) == {0, 1}
    commit(repository, 2)
    power.announced = {0, 2}
    repository.retain(1)
    power.happens("the end")
    assert len(power.tried) > 30, "hardly any power failure was tried: the watched functions are not called"


def test_what_is_synced_when(power, tmp_path):
    power.trying = False
    repository = Repository.create(tmp_path / "disk" / "run" / "state", Description(SAMPLES, SCHEMA, BLOCK_ROWS, "g"))

    @contextmanager
    def logged():
        power.log.clear()
        yield
        done = [event for event in power.log if event.endswith(" done") or " done " in event]
        idle = [event for event in power.log if event.startswith("unlink") and event.endswith(".partial")]
        power.log[:] = [event for event in power.log if event not in [*done, *idle]]

    def replaced(file):
        beside = f"{file.parent}/.{file.name}.{writer_name()}.partial"
        return [f"fsync {beside}", f"replace {beside}", f"fsync {file.parent}"]

    state = Path("run/state")
    announced = replaced(state / "thermopile.copy.json") + replaced(state / "thermopile.json")
    with logged():
        commit(repository, 1)
    begun = replaced(state / "refs/branch.main/ref.json")
    assert power.log == [*begun, "sync_file_system", "flush", "sync_file_system", *announced]
    commit(repository, 2)
    with logged():
        repository.retain(1)
    assert power.log[: len(announced)] == announced
    deleted = [event.split("/")[-2] for event in power.log[len(announced) :]]
    assert set(deleted) == {"chunks", "manifests", "snapshots", "transactions"}
    commit(repository, 3)
    with logged():
        repository.undo_after(repository.resolve("step-0"))
    assert power.log == announced
