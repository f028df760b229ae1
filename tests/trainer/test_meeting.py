"""Ranks find each other: on machines whose own name leads nowhere, and again after a restart by torchrun."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

RESTARTED = """
import os, signal
from thermopile.trainer.world import joined_world
with joined_world() as world:
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    assert world.all_gather([world.rank]) == [[0], [1]]
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
    assert done.stdout.splitlines().count("joined after 2 restarts") == 2


JOINED = """
from thermopile.trainer.world import joined_world
with joined_world() as world:
    print(world.all_gather([world.rank]), flush=True)
"""


@pytest.fixture
def two_hosts():
    """Two network namespaces that reach each other at 10.77.0.1 and 10.77.0.2; each finds its own name at 127.0.1.1."""
    may = ("unshare", "--net", "--mount", "ip", "link")
    if not shutil.which("ip") or subprocess.run(may, capture_output=True, check=False).returncode:
        pytest.skip("needs ip of iproute2, and the right to make network namespaces")

    def ip(*words):
        subprocess.run(("ip", *words), check=True)

    names = [f"thermopile-{os.getpid()}-{place}" for place in (1, 2)]
    with ExitStack() as end:
        for name in names:
            ip("netns", "add", name)
            end.callback(ip, "netns", "delete", name)
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            end.callback(shutil.rmtree, hosts.parent)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
        ip("link", "add", "eth7", "netns", names[0], "type", "veth", "peer", "name", "eth7", "netns", names[1])
        for place, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{place}/24", "dev", "eth7")
            for link in ("lo", "eth7"):
                ip("-n", name, "link", "set", link, "up")
        yield names


def test_ranks_on_machines_whose_own_name_leads_to_the_loopback_reach_each_other(two_hosts):
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    ranks = [
        subprocess.Popen(
            ("ip", "netns", "exec", host, sys.executable, "-c", JOINED),
            env=os.environ | shared | {"RANK": str(rank), "MASTER_ADDR": "10.77.0.1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(two_hosts)
    ]
    try:
        assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["[[0], [1]]\n"] * 2
    finally:
        for rank in ranks:
            rank.kill()
