"""A store in a bucket holds what one in a directory holds, whatever fails, and whoever else writes."""

import os
import pickle
import random
import subprocess
import threading
from itertools import count
from types import SimpleNamespace

import icechunk
import numpy as np
import pytest
import torch

from thermopile.state_store import history, icechunk_files
from thermopile.state_store.durable import Repository, list_snapshots
from thermopile.state_store.errors import DamagedChunkError, SnapshotError, StoreLockedError
from thermopile.state_store.history import INDEX
from thermopile.state_store.ranks import Ranks
from thermopile.state_store.reader import StateReader
from thermopile.state_store.schema import Description
from thermopile.state_store.store import StateStore
from thermopile.storage import bucket_lock
from thermopile.storage.bucket import SCRATCH, Address
from thermopile.storage.bucket_errors import ObjectStoreError
from thermopile.storage.lock import LockedError, TakenOverError
from thermopile.storage.sealed_json import seal_line

from support.commits import BLOCK_ROWS, SAMPLES, SCHEMA, assert_all_rows, commit, rows, tags
from support.programs import crashing, program
from support.programs.crashing import ExpectedState, assert_columns_equal, run_until_killed

pytestmark = pytest.mark.wide

WRITER = "0" * 32
_runs = count()


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    return tmp_path


@pytest.fixture
def path(s3):
    return Address("bucket", f"run-{next(_runs)}") / "state"


@pytest.fixture
def repository(path):
    return Repository.create(path, Description(SAMPLES, SCHEMA, BLOCK_ROWS, "glyphs-1"), WRITER)


@pytest.fixture
def elsewhere(scratch, monkeypatch):
    """Go on as on another machine: with another folder of local files, where beats come fast."""
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(bucket_lock, "SILENT_SECONDS", 2.0)

    def move(machine):
        monkeypatch.setenv(SCRATCH, str(scratch / machine))

    return move


@pytest.mark.parametrize("kind", ["resident", "windowed"])
def test_every_snapshot_is_as_on_a_disk(kind, path, tmp_path):
    made_for = {"samples": crashing.SAMPLES, "fields": crashing.FIELDS, "dataset_fingerprint": "crash",
                "memory_budget": crashing.MEMORY_BUDGETS[kind]}  # fmt: skip
    places = [path, tmp_path / "state"]
    for begin in (lambda place: StateStore.create(place, block_rows=crashing.ORDER.block_rows, **made_for),
                  lambda place: StateStore.open(place, **made_for)):  # fmt: skip
        for place in places:
            with begin(place) as store:
                store.expect(crashing.windows_after(store.last_snapshot.step))
                for step in range(store.last_snapshot.step + 1, store.last_snapshot.step + 7):
                    ids, new = crashing.batch_of_step(step)
                    store.take(ids)
                    store.put(ids, {name: torch.from_numpy(row) for name, row in new.items()}, step=step)
                    if step % 3 == 0:
                        store.snapshot(step, epoch=0)
    assert [each.tag for each in list_snapshots(path)] == ["step-0", "step-3", "step-6", "step-9", "step-12"]
    for snapshot in list_snapshots(path):
        on_disk = StateReader.open(places[1], snapshot.tag)
        columns = {name: on_disk.column(name) for name in on_disk.columns}
        assert_columns_equal(StateReader.open(str(path), snapshot.id).column, columns)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["resident", "windowed"])
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_a_killed_run_reopens_exactly_at_a_snapshot_no_older_than_the_last_announced(start, path, kind, kills):
    moments, expected, announced = random.Random(7), ExpectedState(), 0
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", SCRATCH))}
    for _ in range(kills):
        killed_after = {"snapshots": moments.randrange(4), "seconds": moments.uniform(0, 0.5)}
        announced = max([announced, *run_until_killed(start, path, kind, variables, **killed_after)])
        snapshots = [snapshot for snapshot in list_snapshots(path) if snapshot.step >= expected.step]
        assert snapshots[-1].step >= announced
        for snapshot in snapshots:
            assert_columns_equal(StateReader.open(path, snapshot.id).column, expected.after(snapshot.step))
        announced = snapshots[-1].step
    assert announced > 0, "no run lived long enough to write a snapshot: this test has shown nothing"


def test_a_creation_that_was_killed_leaves_no_store_and_is_repeated(path):
    description = Description(SAMPLES, SCHEMA, BLOCK_ROWS, "glyphs-1")
    Repository.create(path, description, WRITER)
    (path / INDEX).delete()  # it comes last
    repository = Repository.create(path, description, WRITER)
    commit(repository, 1)
    assert_all_rows(repository, "latest", 1)


def test_objects_are_bounded_by_the_snapshots_kept(repository, path):
    objects = []
    for step in range(1, 11):
        commit(repository, step)
        repository.retain(2)
        objects.append(sum(1 for _ in path.listing()))
    assert tags(repository) == ["step-0", "step-9", "step-10"]
    assert objects[9] == objects[4]


def test_nothing_is_deleted_while_a_kept_snapshot_cannot_be_read(repository, path):
    for step in (1, 2):
        commit(repository, step)
    name, _ = sorted(repository.resolve("step-1").files.items())[0]
    (path / name).write((path / name).read_bytes()[:-1] + b"x")
    before = list(path.listing())
    with pytest.raises(SnapshotError, match="sha256 does not match"):
        repository.retain(2)
    assert list(path.listing()) == before


def test_a_missing_chunk_is_damage_that_names_it_and_a_store_that_is_away_is_not(repository, path, s3, monkeypatch):
    commit(repository, 1)
    reader = StateReader.open(path)
    chunk = next(name for name, _, _ in path.listing() if name.startswith("chunks/"))
    held = (path / chunk).read_bytes()
    (path / chunk).delete()
    with pytest.raises(DamagedChunkError, match=rf"chunk \d.*{chunk}.*NoSuchKey"):
        [reader.column(name) for name in reader.columns]
    (path / chunk).write(held[:-1])
    with pytest.raises(DamagedChunkError, match=r"chunk \d.*it holds 1,027 of the 1,028 bytes"):
        [reader.column(name) for name in reader.columns]
    (path / chunk).write(held)
    monkeypatch.setattr("thermopile.storage.bucket.PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("thermopile.state_store.icechunk_files._REPEATS", icechunk.StorageRetriesSettings(max_tries=1))
    with s3.gateway() as gateway:
        gateway.stop()
        with pytest.raises(ObjectStoreError, match="AWS_ENDPOINT_URL"):
            icechunk_files.verified(path, INDEX, "")
        with pytest.raises(ObjectStoreError, match="AWS_ENDPOINT_URL"):
            StateReader.open(path)
    with s3.gateway() as gateway:
        reader = StateReader.open(path)
        gateway.stop()
        with pytest.raises(ObjectStoreError, match="AWS_ENDPOINT_URL"):
            [reader.column(name) for name in reader.columns]


def test_a_store_that_fails_now_and_then_takes_every_snapshot_in_two_attempts(repository, path, s3):
    base = repository.resolve("latest")
    with s3.gateway(failing=0.05) as gateway:
        for step in range(1, 11):
            try:
                base = commit(repository, step, base=base)
            except SnapshotError:  # icechunk does not repeat a request whose answer ends early
                base = commit(repository, step, base=base)
            repository.retain(2)
        assert gateway.stats()["failed"] > 5
    for snapshot in repository.snapshots()[1:]:
        assert_all_rows(repository, snapshot.tag, snapshot.step)


def test_a_store_that_goes_away_during_a_snapshot_is_waited_for(repository, path, s3):
    with s3.gateway() as gateway:

        def parts():
            gateway.stop()
            threading.Timer(3.0, gateway.start).start()
            yield rows(1)

        commit(repository, 1, parts())
        assert_all_rows(repository, "latest", 1)


def test_a_second_writer_is_refused_at_once_here_and_after_a_beat_elsewhere(create, path, elsewhere):
    elsewhere("first")
    create(path=path)
    with pytest.raises(StoreLockedError, match=f"is being written by pid {os.getpid()} on "):
        create(path=path)
    elsewhere("second")
    with pytest.raises(StoreLockedError, match=f"is being written by pid {os.getpid()} on .*, since 20"):
        create(path=path)


def test_a_lock_that_was_released_is_free_elsewhere(create, resume, path, elsewhere, monkeypatch):
    elsewhere("first")
    create(path=path).close()
    elsewhere("second")
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 1e6)  # waiting for one would last for ever
    resume(path=path)


def test_a_killed_holders_lock_is_taken_at_once_here_and_after_silence_elsewhere(
    start, path, resume, elsewhere, monkeypatch
):
    elsewhere("first")
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", SCRATCH))}
    run_until_killed(start, path, "resident", variables, snapshots=1, seconds=0)
    made_for = {"path": path, "samples": crashing.SAMPLES, "fields": crashing.FIELDS,
                "dataset_fingerprint": "crash"}  # fmt: skip
    elsewhere("second")
    resume(**made_for).close()
    run_until_killed(start, path, "resident", variables, snapshots=0, seconds=0)
    elsewhere("first")
    monkeypatch.setattr(bucket_lock, "SILENT_SECONDS", 1e6)
    resume(**made_for).close()


def test_a_writer_taken_for_dead_is_stopped_at_its_next_snapshot(
    create, resume, path, new_rows, elsewhere, monkeypatch
):
    elsewhere("first")
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 1e6)  # it sleeps
    first = create(path=path)
    first.put(np.arange(100), new_rows(100, 1.0), step=1)
    first.snapshot(1, epoch=0).result()
    elsewhere("second")
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.5)
    second = resume(path=path)
    first.put(np.arange(100), new_rows(100, 2.0), step=2)
    with pytest.raises(StoreLockedError, match="another process has begun to write this state"):
        first.snapshot(2, epoch=0).result()
    with pytest.raises(StoreLockedError, match="another process"):
        first.retain(1).result()
    second.put(np.arange(100), new_rows(100, 3.0), step=2)
    second.snapshot(2, epoch=0).result()
    assert [snapshot.tag for snapshot in list_snapshots(path)] == ["step-0", "step-1", "step-2"]
    for at, value in (("step-1", 1.0), ("step-2", 3.0)):
        np.testing.assert_array_equal(StateReader.open(path, at).column("image/tau"), np.full(100, value))


def test_two_that_take_themselves_for_the_writer_cannot_both_announce(path, repository):
    commit(repository, 1)
    other = Repository(path, "1" * 32)
    other.repair()
    base = other.resolve("latest")
    with pytest.raises(StoreLockedError):
        commit(repository, 2, base=base)
    commit(other, 2)
    assert_all_rows(other, "step-2", 2)


def test_the_index_is_replaced_only_by_who_has_read_it(path, repository):
    before, _ = history.load(path)
    commit(repository, 1)
    with pytest.raises(StoreLockedError, match="all snapshots that were announced are intact"):
        history.replace(path, before)
    assert tags(repository) == ["step-0", "step-1"]


def test_a_snapshot_builds_on_the_last_one_whatever_moves_the_reference(path, repository):
    commit(repository, 1)

    def parts():
        yield rows(2)
        icechunk_files.point_reference_at(path, repository.resolve("step-0").id)

    commit(repository, 2, parts())
    assert_all_rows(repository, "step-2", 2)


@pytest.mark.parametrize("keep", [1, 9])
def test_a_writer_that_is_replaced_while_it_looks_for_garbage_deletes_nothing(path, repository, monkeypatch, keep):
    for step in (1, 2):
        commit(repository, step)
    (path / "chunks" / ("0" * 20)).write(b"of the next writer's commit")
    other, find = Repository(path, "1" * 32), icechunk_files.find_garbage

    def find_and_be_replaced(*arguments):
        garbage = find(*arguments)
        assert garbage
        other.repair()
        return garbage

    monkeypatch.setattr(icechunk_files, "find_garbage", find_and_be_replaced)
    before = [name for name, _, _ in path.listing()]
    with pytest.raises(StoreLockedError):
        repository.retain(keep)
    assert [name for name, _, _ in path.listing()] == before


def test_a_lock_is_not_taken_for_a_silence_in_which_the_store_was_away(path, tmp_path, monkeypatch):
    clock, reads, lock = [0.0], count(1), path.with_name("state.lock")
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 1e6)
    holder = bucket_lock.BucketLock(lock, made_folder(tmp_path / "holder"), TakenOverError)
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 10.0)

    def sleep(seconds):
        clock[0] += seconds

    def read_version(address, max_bytes):
        match next(reads):
            case 2:
                sleep(70)  # the store was away
            case 3:
                holder._holder.beats += 1
                address.write(holder._text())
        return version_of(address, max_bytes)

    version_of = Address.read_version
    monkeypatch.setattr(Address, "read_version", read_version)
    monkeypatch.setattr(bucket_lock, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with pytest.raises(LockedError, match=f"pid {os.getpid()} on "):
        bucket_lock.BucketLock(lock, made_folder(tmp_path / "watcher"), TakenOverError)
    assert next(reads) > 3


def made_folder(path):
    path.mkdir()
    return path


def test_a_lock_that_was_tampered_with_is_not_repeated(create, path):
    lock = path.with_name("state.lock")
    create(path=path).close()
    for name in ("pid 1 on \x1b[31mevil", "pid 1 on a\nb", "x" * 9_000):
        lock.write(seal_line({"name": name, "since": "2026-01-01 00:00 UTC", "folder": "", "writer": "", "beats": 1}))
        assert bucket_lock.bucket_lock_status(lock).holder == "another process"


def test_the_part_of_a_commit_that_goes_to_other_ranks_holds_no_credentials(repository):
    class Kept(Ranks):
        sent = b""

        def broadcast(self, value):
            self.sent += pickle.dumps(value)
            return value

    ranks = Kept()
    commit(repository, 1, ranks=ranks)
    assert b"endpoint" in ranks.sent or b"127.0.0.1" in ranks.sent
    assert os.environ["AWS_SECRET_ACCESS_KEY"].encode() not in ranks.sent
    assert os.environ["AWS_ACCESS_KEY_ID"].encode() not in ranks.sent


def test_no_object_and_no_local_file_holds_credentials(create, path, scratch, new_rows):
    store = create(path=path)
    store.put(np.arange(100), new_rows(100), step=1)
    store.snapshot(1, epoch=0).result()
    written = [(path.parent / name).read_bytes() for name, _, _ in path.parent.listing()]
    written += [file.read_bytes() for file in scratch.rglob("*") if file.is_file()]
    assert len(written) > 5
    for secret in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        assert not any(os.environ[secret].encode() in data for data in written)


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_the_state_of_ten_million_rows_is_exact_after_each_of_fifty_kills():
    run = subprocess.run(program("bucket_kills", 10_000_000, 50), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)
