"""Ranks of several hosts train as those of one host do, whatever happens to a host, and on others afterwards."""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from thermopile.benchmarks.object_server import free_port
from thermopile.storage.bucket import Address
from thermopile.trainer.run_directory import RunDirectory

from support.hosts import COMPARE, WAIT_FOR_CHECKPOINT
from support.runs import assert_same_run, finish, wait_for

pytestmark = pytest.mark.wide

NAMED_WITHIN, CUT_OFF_NAMED_WITHIN = 15, 90
"""Seconds."""


def assert_end_naming(programs, lost, within):
    """Assert that each program ends within `within` seconds, with an error that names the lost rank.

    lost: such as "rank 1 (host, process 7)".
    """
    began = time.monotonic()
    with ThreadPoolExecutor(len(programs)) as threads:
        ends = threads.map(lambda program: (*program.end(within=280), time.monotonic() - began), programs)
    for code, _, errors, seconds in ends:
        assert code == 1, errors
        assert f"lost {lost} " in errors.splitlines()[-1]
        assert seconds < within


@pytest.fixture(scope="module", autouse=True)
def cut_off(hosts, start, tmp_path_factory):
    """A run whose second host was cut off while it trained: where it is, its ranks, how each ended and after how long.

    Begun before all tests, since it takes more than a minute.
    """
    run, two = RunDirectory(tmp_path_factory.mktemp("cut_off") / "run"), hosts[3:]
    ranks = start(run, two)
    wait_for(run, 6, ranks)
    two[1].plug("down")
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        ends = threads.map(lambda rank: (*rank.end(within=280), time.monotonic() - began), ranks)
        yield run, ranks, ends


def test_a_killed_rank_is_named_and_the_run_goes_on_with_more_hosts_and_with_one(hosts, start, whole, tmp_path):
    run, (ada, ben, cleo) = RunDirectory(tmp_path / "run"), hosts[:3]
    ranks = start(run, [ada, ben], each=3)
    wait_for(run, 6, ranks)
    ranks[4].kill()
    assert_end_naming(ranks[:4] + ranks[5:], f"rank 4 (ben, process {ranks[4].pid})", NAMED_WITHIN)
    ranks = start(run, [ben, cleo, ada], each=2)
    wait_for(run, 15, ranks)
    ranks[3].send(signal.SIGUSR1)
    assert [rank.end()[0] for rank in ranks] == [75] * 6
    finish(start(run, [cleo], each=6))
    assert_same_run(run, whole(6))


NAMED = """
import ctypes, os, socket
from thermopile.trainer.world import joined_world
assert ctypes.CDLL(None).unshare(0x04000000) == 0  # CLONE_NEWUTS
socket.sethostname(sys.argv[1])
os.sched_getaffinity = lambda process: range(12)
with joined_world() as world:
    print(world.cores)
"""


def test_ranks_divide_the_cores_of_a_machine_whatever_names_it_has_there_and_others_have(hosts):
    shared = {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "ada", "MASTER_PORT": free_port(), "LOCAL_RANK": 0}
    places = enumerate(((hosts[0], "one"), (hosts[0], "another"), (hosts[1], "one")))
    ranks = [host.start(name, code=NAMED, **shared, RANK=rank) for rank, (host, name) in places]
    assert [said for said, _ in finish(ranks)] == ["6\n", "6\n", "12\n"]


def test_a_run_directory_on_the_hosts_own_disks_is_refused(hosts, start, own_disk):
    run = RunDirectory(own_disk / "run")
    for code, _, errors in (rank.end() for rank in start(run, hosts[:2])):
        assert code == 2
        assert "rank 1 (on ben) cannot see files that rank 0 (on ada) writes in its run directory" in errors
    assert not any(host.path(run.path).exists() for host in hosts)


@pytest.mark.timeout(600)  # the lock of a lost host holds for a minute, and a busy machine takes long for 60 steps
def test_a_run_in_a_bucket_goes_on_when_the_host_of_rank_0_is_lost_and_replaced(hosts, bucket, start, whole):
    run, (ada, ben, cleo) = RunDirectory(Address("bucket", "run")), hosts[:3]
    first, second = start(run, [ada, ben], **bucket)
    finish([cleo.start(run.path, code=WAIT_FOR_CHECKPOINT, **bucket)])
    ada.kill()
    assert_end_naming([second], f"rank 0 (ada, process {first.pid})", NAMED_WITHIN)
    (_, said), _ = finish(start(run, [cleo, ben], **bucket))
    assert re.search(r"resuming at step [1-9]", said)
    finish([cleo.start(run.path, whole(2).path, code=COMPARE, **bucket)])


def test_hosts_that_do_not_reach_each_other_end_and_the_run_goes_on_without_the_one_cut_off(
    cut_off, hosts, start, whole
):
    run, ranks, ends = cut_off
    names = ("dora", "emil")
    for (code, _, errors, seconds), lost in zip(ends, (1, 0), strict=True):
        assert code == 1, errors
        assert f"lost rank {lost} ({names[lost]}, process {ranks[lost].pid})" in errors.splitlines()[-1]
        assert seconds < CUT_OFF_NAMED_WITHIN
    finish(start(run, [hosts[3], hosts[0]]))
    assert_same_run(run, whole(2))
