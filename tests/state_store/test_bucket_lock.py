"""The writer lock in a store that obstore keeps in memory; test_bucket.py has it on a server, beneath whole stores."""

import os
import socket
from dataclasses import replace

import pytest
from obstore.store import MemoryStore

from thermopile import objects
from thermopile.lock import LockedError
from thermopile.objects import Address
from thermopile.places import SCRATCH, made_local_folder
from thermopile.sealed_json import seal_line
from thermopile.state_store import bucket_lock
from thermopile.state_store.bucket_lock import BucketLock, lock_status

LOCK = Address("bucket", "run/state.lock")


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    store = MemoryStore()
    monkeypatch.setattr(objects, "_store", lambda bucket, repeats=0: store)
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.05)


@pytest.fixture
def folder(tmp_path):
    """Make a folder as a machine of its own has it."""

    def make(name):
        (tmp_path / name).mkdir()
        return tmp_path / name

    return make


def test_a_lock_is_refused_while_its_holder_beats_and_free_once_it_is_released(folder):
    holder = BucketLock(LOCK, folder("first"))
    with pytest.raises(LockedError, match=f"^held by pid {os.getpid()} on .*, since 20"):
        BucketLock(LOCK, folder("second"))
    assert lock_status(LOCK).is_held
    holder.release()
    assert not lock_status(LOCK).is_held
    BucketLock(LOCK, folder("third")).release()


def test_a_lock_says_at_once_on_the_machine_of_its_holder_that_it_was_killed_and_elsewhere_after_a_silence(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(SCRATCH, str(tmp_path / "here"))
    BucketLock(LOCK, made_local_folder(LOCK.parent)).release()
    own = (made_local_folder(LOCK.parent) / "id").read_text()
    killed = {"name": "pid 1 on here", "since": "2026-01-01 00:00 UTC", "folder": own, "writer": "", "beats": 3}
    LOCK.write(seal_line(killed) + b"\n")
    assert (lock_status(LOCK).holder, lock_status(LOCK).is_held) == ("pid 1 on here", False)
    monkeypatch.setenv(SCRATCH, str(tmp_path / "elsewhere"))
    assert lock_status(LOCK).is_held
    monkeypatch.setattr(bucket_lock, "SILENT_SECONDS", 0.0)
    assert not lock_status(LOCK).is_held


def test_a_lock_of_a_killed_process_is_taken_after_a_silence(folder, monkeypatch):
    monkeypatch.setattr(bucket_lock, "SILENT_SECONDS", 0.1)
    killed = {"name": "pid 1 on elsewhere", "since": "2026-01-01 00:00 UTC", "folder": "", "writer": "", "beats": 3}
    LOCK.create(seal_line(killed) + b"\n")
    assert lock_status(LOCK).holder == "pid 1 on elsewhere"
    lock = BucketLock(LOCK, folder("second"))
    assert lock_status(LOCK).holder == f"pid {os.getpid()} on {socket.gethostname()}"
    lock.release()


def test_a_lease_that_ends_while_a_large_object_is_sent_is_renewed(folder, monkeypatch):
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 1e6)
    monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 0.0)  # it has always ended
    monkeypatch.setattr(objects, "RANGE_BYTES", 1000)
    lock = BucketLock(LOCK, folder("first"))
    large = replace(LOCK.with_name("large"), lease=lock)
    large.write(data := os.urandom(5000))
    assert large.read() == data
    lock.release()
