import os
import subprocess
import sys

import pytest

from thermopile.state_store import StoreLockedError
from thermopile.state_store.lock import WriterLock

HOLD = """
import sys, pathlib
from thermopile.state_store.lock import WriterLock
lock = WriterLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_writer_is_told_who_the_first_one_is(path):
    lock = WriterLock(path)
    with pytest.raises(StoreLockedError, match=f"being written by pid {os.getpid()} on "):
        WriterLock(path)
    lock.release()
    WriterLock(path).release()


def test_the_lock_holds_between_processes_and_ends_with_the_holder_however_it_dies(path):
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreLockedError, match=f"pid {holder.pid} on "):
            WriterLock(path)
        holder.kill()
    WriterLock(path).release()


def test_the_lock_lies_beside_the_repository(path):
    lock = WriterLock(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["state.lock"]
    lock.release()
