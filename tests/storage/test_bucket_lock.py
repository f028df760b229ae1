"""The writer lock in a store that obstore keeps in memory; test_bucket.py has it on a server, beneath whole stores."""

import os
import socket
from dataclasses import replace

import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from thermopile.state_store.errors import StoreLockedError
from thermopile.state_store.history import taken_over
from thermopile.storage import bucket as addresses
from thermopile.storage import bucket_lock
from thermopile.storage.bucket import SCRATCH, Address
from thermopile.storage.bucket_errors import ObjectStoreError
from thermopile.storage.bucket_lock import BucketLock, bucket_lock_status
from thermopile.storage.lock import LockedError
from thermopile.storage.sealed_json import seal_line

LOCK = Address("bucket", "run/state.lock")


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    store = MemoryStore()
    monkeypatch.setattr(addresses, "_store", lambda bucket, repeats=0: store)
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.05)


@pytest.fixture
def folder(tmp_path):
    """Make a folder as a machine of its own has it."""

    def make(name):
        (tmp_path / name).mkdir()
        return tmp_path / name

    return make


def held(folder, last_writer=None):
    return BucketLock(LOCK, folder, lambda: taken_over(LOCK.with_name("state")), last_writer)


def test_a_lock_is_refused_while_its_holder_beats_and_free_once_it_is_released(folder):
    holder = held(folder("first"))
    with pytest.raises(LockedError, match=f"^held by pid {os.getpid()} on .*, since 20"):
        held(folder("second"))
    assert bucket_lock_status(LOCK).is_held
    holder.release()
    assert not bucket_lock_status(LOCK).is_held
    held(folder("third")).release()


def test_a_lock_says_at_once_on_the_machine_of_its_holder_that_it_was_killed_and_elsewhere_after_a_silence(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(SCRATCH, str(tmp_path / "here"))
    held(LOCK.parent.made_scratch()).release()
    own = (LOCK.parent.made_scratch() / "id").read_text()
    killed = {"name": "pid 1 on here", "since": "2026-01-01 00:00 UTC", "folder": own, "writer": "", "beats": 3}
    LOCK.write(seal_line(killed) + b"\n")
    assert (bucket_lock_status(LOCK).holder, bucket_lock_status(LOCK).is_held) == ("pid 1 on here", False)
    monkeypatch.setenv(SCRATCH, str(tmp_path / "elsewhere"))
    assert bucket_lock_status(LOCK).is_held
    monkeypatch.setattr(bucket_lock, "SILENT_SECONDS", 0.0)
    assert not bucket_lock_status(LOCK).is_held


def test_a_lock_of_a_killed_process_is_taken_after_a_silence(folder, monkeypatch):
    monkeypatch.setattr(bucket_lock, "SILENT_SECONDS", 0.1)
    killed = {"name": "pid 1 on elsewhere", "since": "2026-01-01 00:00 UTC", "folder": "", "writer": "", "beats": 3}
    LOCK.create(seal_line(killed) + b"\n")
    assert bucket_lock_status(LOCK).holder == "pid 1 on elsewhere"
    lock = held(folder("second"))
    assert bucket_lock_status(LOCK).holder == f"pid {os.getpid()} on {socket.gethostname()}"
    lock.release()


def test_a_request_that_begins_at_the_end_of_a_lease_is_over_before_another_may_take_the_lock():
    assert bucket_lock.LEASE_SECONDS + addresses.REQUEST_SECONDS < bucket_lock.SILENT_SECONDS
    assert addresses._PART_SECONDS < bucket_lock.LEASE_SECONDS


@pytest.fixture
def asleep(folder, monkeypatch):
    """A lock whose holder does not renew it by itself, and whose lease ends at once; and what is under it."""
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 1e6)
    monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 0.0)
    lock = held(folder("asleep"))
    yield lock, replace(Address("bucket", "run/file"), lease=lock)
    lock.release()


def taken_by_another():
    _, version = LOCK.read_version()
    another = {"name": "pid 1 on elsewhere", "since": "2026-01-01 00:00 UTC", "folder": "", "writer": "f" * 32}
    LOCK.replace(seal_line(another | {"beats": 0}) + b"\n", version)


def test_before_every_request_a_lease_that_has_ended_is_renewed(asleep):
    _, file = asleep
    for request in (lambda: file.write(b"data"), file.read_bytes, lambda: list(file.parent.listing()), file.delete):
        _, before = LOCK.read_version()
        request()
        assert LOCK.read_version()[1] != before


@pytest.mark.parametrize("verb", ["write", "create", "rewrite", "read_bytes", "delete", "listing"])
def test_nothing_is_asked_of_a_bucket_once_the_lock_is_anothers(asleep, verb):
    _, file = asleep
    taken_by_another()
    objects_before = list(Address("bucket", "").listing())
    for _ in range(2):
        with pytest.raises(StoreLockedError, match="s3://bucket/run/state: another process has begun to write"):
            list(getattr(file, verb)(*([b"data"] if verb in ("write", "create", "rewrite") else [])))
    assert list(Address("bucket", "").listing()) == objects_before


def test_a_part_of_a_large_object_is_sent_only_under_the_lease(asleep, tmp_path, monkeypatch):
    _, file = asleep
    monkeypatch.setattr(addresses, "RANGE_BYTES", 10)
    pieces = file._pieces(b"0123456789" * 3)
    assert next(pieces) == b"0123456789"
    taken_by_another()
    with pytest.raises(StoreLockedError):
        next(pieces)


def test_a_renewal_whose_answer_was_lost_is_ones_own(asleep):
    lock, file = asleep
    lock._holder.beats += 1
    LOCK.replace(lock._text(), lock._version)  # that of this process, which does not know its version
    file.write(b"data")
    assert file.read_bytes() == b"data"


def test_a_store_that_is_away_ends_no_lease(asleep, monkeypatch):
    _, file = asleep
    monkeypatch.setattr(addresses, "PATIENCE_SECONDS", 0.0)

    def away(bucket, repeats=0):
        raise GenericError("away")

    with monkeypatch.context() as outage:
        outage.setattr(addresses, "_store", away)
        with pytest.raises(ObjectStoreError, match="away"):
            file.write(b"data")
    file.write(b"data")


def test_a_lock_that_someone_deleted_is_made_again(asleep):
    _, file = asleep
    LOCK.delete()
    file.write(b"data")
    assert bucket_lock_status(LOCK).is_held


def test_nothing_is_changed_under_a_lock_that_was_released(folder):
    lock = held(folder("first"))
    file = replace(Address("bucket", "run/file"), lease=lock)
    lock.release()
    with pytest.raises(StoreLockedError):
        file.write(b"data")
    assert not bucket_lock_status(LOCK).is_held


def test_each_holding_has_a_greater_term_also_after_a_lock_was_deleted_or_left_by_an_earlier_version(folder):
    terms, last = [], None
    for number, before in enumerate((None, None, "deleted", b"\n", "killed")):
        if before == "deleted":
            LOCK.delete()
        elif before == "killed":
            killed = {"name": "pid 1 on elsewhere", "since": "2026-01-01 00:00 UTC", "folder": "", "beats": 3}
            LOCK.write(seal_line(killed | {"writer": "0000000a" + "0" * 24}) + b"\n")
        elif before:
            LOCK.write(before)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bucket_lock, "SILENT_SECONDS", 0.0)
            lock = held(folder(str(number)), last)
        terms, last = [*terms, lock.term], lock.writer
        lock.release()
    assert terms == ["00000001", "00000002", "00000003", "00000004", "0000000b"]


def test_a_lease_that_ends_while_a_large_object_is_sent_is_renewed(folder, monkeypatch):
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 1e6)
    monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 0.0)  # it has always ended
    monkeypatch.setattr(addresses, "RANGE_BYTES", 1000)
    lock = held(folder("first"))
    large = replace(LOCK.with_name("large"), lease=lock)
    large.write(data := os.urandom(5000))
    assert large.read_bytes() == data
    lock.release()


def test_a_lock_is_taken_from_a_store_that_then_fails_for_a_while(folder, monkeypatch):
    def failing(*_):
        raise ObjectStoreError("away")

    with monkeypatch.context() as away:
        away.setattr(Address, "replace", failing)
        lock = held(folder("first"))
        with pytest.raises(ObjectStoreError, match="away"):
            lock.confirm(0.0)
    lock.confirm(0.0)
    lock.release()
