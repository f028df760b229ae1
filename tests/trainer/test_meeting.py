"""Ranks find each other, after a restart by torchrun too, and no strangers; tests/hosts has several machines."""

import hmac
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from thermopile.trainer import meeting

pytestmark = pytest.mark.wide

RESTARTED = """
import os, signal
from thermopile.trainer.world import joined_world
with joined_world() as world:
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    assert world.control.all_gather([world.rank]) == [[0], [1]]
    if restarts < 2 and world.rank == restarts:
        os.kill(os.getpid(), signal.SIGKILL)
    world.any_rank(False)
    print(f"joined after {restarts} restarts", flush=True)
"""


def test_ranks_that_torchrun_restarts_do_not_look_for_those_that_died(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RESTARTED)
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", program)
    torchrun = (sys.executable, "-m", "torch.distributed.run", *options)
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("joined after 2 restarts") == 2  # the two may write them on one line


JOIN = """
import time
from pathlib import Path
from thermopile.trainer.world import joined_world
{before}
with joined_world() as world:
    print("joined", flush=True)
    while not Path(sys.argv[1], "end").exists(): time.sleep(0.05)
    assert world.control.all_gather([world.rank]) == [[0], [1]]
"""
# Behind torch's own meeting, for which rank 0 waits too.
WAIT = """
from thermopile.trainer import world
meet = world.meet
def meet_late(*arguments):
    while not Path(sys.argv[1], "begin").exists(): time.sleep(0.05)
    return meet(*arguments)
world.meet = meet_late
"""
WITH_ANOTHER_SECRET = """
import os
from datetime import timedelta
from thermopile.trainer import meeting
os.environ["THERMOPILE_SECRET"], meeting.MEETING_TIMEOUT = "another", timedelta(seconds=10)
"""


def listening(process):
    """Return the ports on which a process listens, by IPv4 address; "all" for a socket on all interfaces."""
    own = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(entry))
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                address, port = local.split(":")
                packed = bytes.fromhex(address)[::-1]
                name = socket.inet_ntoa(packed) if len(packed) == 4 else "all"
                ports.setdefault(name if any(packed) else "all", set()).add(int(port, 16))
    return ports


@pytest.fixture
def waiting(start_ranks, tmp_path):
    """Rank 0, which waits for rank 1, and rank 1, which has not come; and where each file of theirs is."""
    ranks = start_ranks(2, tmp_path, codes=[JOIN.format(before=""), JOIN.format(before=WAIT)])
    # torch's own store is on all interfaces; the other is the port to meet at.
    while not listening(ranks[0].pid).get("127.0.0.1"):
        assert ranks[0].is_running(), ranks[0].end()
        time.sleep(0.05)
    return *ranks, tmp_path


def let_them_join(first, second, folder):
    (folder / "begin").touch()
    while not (first.has_said("joined") and second.has_said("joined")):
        assert first.is_running(), first.end()
        assert second.is_running(), second.end()
        time.sleep(0.05)


def assert_end_in_order(first, second, folder):
    (folder / "end").touch()
    for code, _, errors in (first.end(), second.end()):
        assert code == 0, errors


def test_ranks_of_one_machine_listen_on_its_loopback_alone_and_only_until_all_have_come(waiting):
    first = waiting[0]
    ports = listening(first.pid)
    assert ports.keys() == {"all", "127.0.0.1"}
    assert len(ports["all"]) == 1  # torch's
    let_them_join(*waiting)
    assert not ports["127.0.0.1"] & listening(first.pid).get("127.0.0.1", set())
    store = TCPStore("127.0.0.1", *ports["all"], is_master=False, wait_for_workers=False)
    assert not store.check(["thermopile"])  # nor is the secret left there
    del store
    assert_end_in_order(*waiting)


@pytest.mark.parametrize("said", [b"", b"\0" * 64, b"\xff\xff\xff\xff" * 100])
def test_a_stranger_on_the_ports_of_a_meeting_changes_nothing(waiting, said):
    first = waiting[0]
    strangers = [socket.create_connection(("127.0.0.1", port)) for port in listening(first.pid)["127.0.0.1"]]
    for stranger in strangers:
        stranger.sendall(said)
    let_them_join(*waiting)
    for stranger in strangers:
        stranger.close()
    assert_end_in_order(*waiting)


def test_who_does_not_know_the_secret_is_not_taken_for_a_rank(waiting):
    for port in listening(waiting[0].pid)["127.0.0.1"]:
        with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):  # it is cut off
            stranger.settimeout(5)
            mine, theirs = bytes(32), stranger.recv(32)
            stranger.sendall(mine + hmac.digest(b"guessed", b"1" + theirs + mine, "sha256"))
            stranger.recv(32)
            member = meeting.RankProcess("stranger", 1, [0], "127.0.0.1", "boot")
            Connection(os.dup(stranger.fileno())).send_bytes(json.dumps([1, member]).encode())
            stranger.recv(32)
    let_them_join(*waiting)
    assert_end_in_order(*waiting)


def test_a_rank_with_another_secret_than_the_launchers_does_not_join(start_ranks, tmp_path):
    first, second = start_ranks(2, tmp_path, codes=[JOIN.format(before=""), JOIN.format(before=WITH_ANOTHER_SECRET)])
    code, _, errors = second.end()
    assert code == 1
    assert re.search("cannot reach rank 0 at 127.0.0.1:.* or one with another THERMOPILE_SECRET", errors)
    assert not first.has_said("joined")
    first.kill()
