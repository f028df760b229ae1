"""torchrun starts all ranks again after one is killed, takes a new host for one that is lost, and passes signals on."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from thermopile.benchmarks.object_server import free_port
from thermopile.storage.bucket import Address
from thermopile.trainer.run_directory import RunDirectory

from support.hosts import COMPARE, WAIT_FOR_CHECKPOINT
from support.runs import assert_same_run, finish, losses, wait_for

pytestmark = pytest.mark.wide

ENDED_WITHIN = 15
"""Seconds."""
TORCHRUN = """
from torch.distributed.run import main
main()
"""


@pytest.fixture
def torchrun(command):
    """Return a function that starts torchrun on each host, as docs/several_gpus.md does.

    first: holds the rendezvous of two hosts, with one rank each; None: a host alone has `each` ranks.
    """
    port = free_port()

    def torchrun(run, hosts, first=None, restarts=0, each=2, **environment):
        two = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", "run")
        alone = ("--standalone", "--nproc-per-node", each)
        options = (*((*two, "--rdzv-endpoint", f"{first.name}:{port}") if first else alone), "--max-restarts", restarts,
                   "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout", 600,
                   "--module", "thermopile")  # fmt: skip
        # Otherwise torchrun tells a new host nothing of where rank 0 is, and all end after a minute.
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
        return [host.start(*options, *command(run), code=TORCHRUN, **environment) for host in hosts]

    return torchrun


def ranks_of(agent):
    return [*map(int, Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split())]


def is_running(process):
    with suppress(FileNotFoundError):
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""  # of a zombie
    return False


def kill_rank(agent):
    os.kill(ranks_of(agent)[0], signal.SIGKILL)


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


def assert_stopped(agents, run):
    ends = [agent.end() for agent in agents]
    steps = [int(step) for _, said, _ in ends for step in re.findall(r"stopped at step (\d+) by .*, checkpoint", said)]
    assert steps == [max(losses(run))], ends


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(0, id="that_holds_the_rendezvous"),
        pytest.param(1, id="of_another_host", marks=pytest.mark.soak),
    ],
)
def test_a_killed_torchrun_takes_its_ranks_with_it_and_the_run_is_stopped_in_order(
    hosts, torchrun, whole, place, tmp_path
):
    run, two = RunDirectory(tmp_path / "run"), hosts[:2]
    agents = torchrun(run, two, two[0])
    wait_for(run, 6, agents)
    ranks, began = [*ranks_of(agents[0]), *ranks_of(agents[1])], time.monotonic()
    agents[place].kill()
    assert agents[1 - place].end()[0] == 1
    while any(map(is_running, ranks)):
        time.sleep(0.05)
    assert time.monotonic() - began < ENDED_WITHIN
    assert_stopped(agents, run)
    finish(torchrun(run, two, two[0]))
    assert_same_run(run, whole(2))


def test_a_killed_torchrun_of_one_rank_takes_it_along(hosts, torchrun, tmp_path):
    run = RunDirectory(tmp_path / "run")
    (agent,) = torchrun(run, hosts[:1], each=1)
    wait_for(run, 6, [agent])
    (rank,) = ranks_of(agent)
    agent.kill()
    while is_running(rank):
        time.sleep(0.05)
    assert_stopped([agent], run)


def test_sigusr1_to_torchrun_stops_a_run_with_which_torchrun_goes_on(hosts, torchrun, whole, tmp_path):
    run = RunDirectory(tmp_path / "run")
    (agent,) = torchrun(run, hosts[:1])
    wait_for(run, 6, [agent])
    agent.send(signal.SIGUSR1)
    assert agent.end()[0] == 1
    assert_stopped([agent], run)
    finish(torchrun(run, hosts[:1]))
    assert_same_run(run, whole(2))


@pytest.mark.soak
def test_a_rank_of_a_run_in_a_bucket_is_killed_and_torchrun_restarts_it(hosts, bucket, torchrun, whole):
    run, (ada, ben, cleo) = RunDirectory(Address("bucket", "torchrun")), hosts[:3]
    agents = torchrun(run, [ada, ben], ada, restarts=1, **bucket)
    finish([cleo.start(run.path, code=WAIT_FOR_CHECKPOINT, **bucket)])
    kill_rank(agents[0])
    (_, said), _ = finish(agents)
    assert "resuming at step" in said
    finish([ada.start(run.path, whole(2).path, code=COMPARE, **bucket)])


@pytest.mark.soak
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
