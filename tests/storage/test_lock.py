"""One holder of a lock file, who is named in it, however the holder ends."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thermopile.storage.lock import FileLock, LockedError, lock_holder, own_folder

HOLD = """
import sys, pathlib
from thermopile.storage.lock import FileLock
lock = FileLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_holder_is_told_who_the_first_one_is(tmp_path):
    path = tmp_path / "lock"
    lock = FileLock(path)
    with pytest.raises(LockedError, match=f"held by pid {os.getpid()} on "):
        FileLock(path)
    lock.release()
    assert path.read_bytes() == b""
    FileLock(path).release()


def test_the_lock_holds_between_processes_and_ends_with_the_holder_however_it_dies(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match=f"pid {holder.pid} on "):
            FileLock(path)
        named, held = lock_holder(path)
        assert (named.split(" on ")[0], held) == (f"pid {holder.pid}", True)
        holder.kill()
    assert lock_holder(path) == (named, False)
    FileLock(path).release()
    assert lock_holder(path) == (None, False)


def test_a_lock_whose_file_the_holder_removed_does_not_hold_the_new_file(tmp_path, monkeypatch):
    path, flock, removed = tmp_path / "lock", fcntl.flock, []

    def removed_in_between(file, operation):
        monkeypatch.undo()
        flock(file, operation)
        path.unlink()
        removed.append(file)

    monkeypatch.setattr(fcntl, "flock", removed_in_between)
    lock = FileLock(path)
    assert len(removed) == 1
    with pytest.raises(LockedError):
        FileLock(path)
    lock.release()


def test_a_missing_directory_is_an_error_and_a_file_that_cannot_be_read_names_nobody(tmp_path):
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "missing" / "lock")
    assert lock_holder(tmp_path / "missing" / "lock") == (None, False)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_on_a_file_system_without_locks_the_error_names_the_file_and_the_cure(tmp_path, monkeypatch, number):
    def refused(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"; mount NFS with its lock service, Lustre with -o flock, or ") as error:
        FileLock(tmp_path / "lock")
    assert (error.value.errno, error.value.filename) == (number, str(tmp_path / "lock"))
    assert len(os.listdir("/proc/self/fd")) == opened


IN_A_FOLDER = """
import sys, pathlib
from thermopile.storage.lock import own_folder
with own_folder(pathlib.Path(sys.argv[1]), "own-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folders_are_each_ones_own_and_leave_nothing(tmp_path):
    with own_folder(tmp_path / "root", "own-") as first, own_folder(tmp_path / "root", "own-") as second:
        (first / "file").write_bytes(b"x")
        assert first != second
    assert list((tmp_path / "root").iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_or_a_link_leads_to_is_not(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "own-link").symlink_to(tmp_path / "precious")
    (tmp_path / "own-link.lock").touch()
    command = [sys.executable, "-c", IN_A_FOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        (folder / "file").write_bytes(b"x")
        with own_folder(tmp_path, "own-"):
            assert (folder / "file").exists()
        process.kill()
    with own_folder(tmp_path, "own-"):
        assert not folder.exists()
    assert (tmp_path / "precious" / "file").exists()


def test_a_folder_that_another_process_locks_while_it_cleans_up_is_not_used(tmp_path, monkeypatch):
    cleaning, names = FileLock(tmp_path / "own-locked.lock"), iter(["locked", "free"])
    monkeypatch.setattr("thermopile.storage.lock.token_hex", lambda size: next(names))
    with own_folder(tmp_path, "own-") as folder:
        assert folder == tmp_path / "own-free"
    cleaning.release()
