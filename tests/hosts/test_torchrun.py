"""torchrun on several hosts starts all ranks again after one is killed, and takes a new host for one that is lost."""

import os
import signal
from pathlib import Path

import pytest

from thermopile.benchmarks.object_server import free_port
from thermopile.trainer.run_directory import RunDirectory

from support.runs import assert_same_run, finish, wait_for

pytestmark = pytest.mark.soak

TORCHRUN = """
from torch.distributed.run import main
main()
"""


@pytest.fixture
def torchrun(command):
    """Return a function that starts torchrun on each host, which starts one rank; `first` holds the rendezvous."""
    port = free_port()

    def torchrun(run, hosts, first, restarts):
        options = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", "run",
                   "--rdzv-endpoint", f"{first.name}:{port}", "--max-restarts", restarts,
                   "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout", 600,
                   "--module", "thermopile")  # fmt: skip
        # Otherwise torchrun tells a new host nothing of where rank 0 is, and all end after a minute.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
        return [host.start(*options, *command(run), code=TORCHRUN, **own_store) for host in hosts]

    return torchrun


def kill_rank(agent):
    (rank,) = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(rank), signal.SIGKILL)


def test_ranks_killed_and_a_host_replaced_are_restarted_and_lose_nothing(hosts, torchrun, whole, tmp_path):
    run, (ada, ben, cleo) = RunDirectory(tmp_path / "run"), hosts[:3]
    agents = torchrun(run, [ada, ben], ada, restarts=3)
    for agent, steps in zip(agents, (10, 20), strict=True):
        wait_for(run, steps, agents)
        kill_rank(agent)
    wait_for(run, 30, agents)
    ben.kill()
    finish([agents[0], *torchrun(run, [cleo], ada, restarts=3)])
    assert_same_run(run, whole(2))


@pytest.mark.timeout(3600)
def test_twenty_kills_with_three_restarts_a_start_lose_nothing(hosts, torchrun, whole, tmp_path):
    run, two = RunDirectory(tmp_path / "run"), hosts[:2]
    for kill in range(20):
        if kill % 4 == 0:
            agents = torchrun(run, two, two[0], restarts=3)
        wait_for(run, 2 * kill + 4, agents)
        kill_rank(agents[kill % 3 % 2])
        if kill % 4 == 3:
            assert [agent.end()[0] for agent in agents] == [1, 1]
    finish(torchrun(run, two, two[0], restarts=3))
    assert_same_run(run, whole(2))
