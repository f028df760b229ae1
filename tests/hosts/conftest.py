"""A network of hosts, the ranks of a run there, and the run that one host alone makes of it."""

from functools import cache

import pytest

from thermopile.benchmarks.object_server import free_port
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.hosts import network
from support.runs import finish


@pytest.fixture(scope="session")
def own_disk(tmp_path_factory):
    """A folder that is another one on each host."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="session")
def connected(start_program, own_disk):
    with network(["ada", "ben", "cleo", "dora", "emil"], own_disk, start_program) as made:
        yield made


@pytest.fixture(scope="session")
def hosts(connected):
    """Five hosts; tests that pull cables take the last two."""
    return connected.hosts


@pytest.fixture(scope="session")
def bucket(connected):
    """Variables that lead a host to a server with an empty bucket, s3://bucket."""
    with connected.object_server() as variables:
        yield variables


@pytest.fixture(scope="session")
def settings():
    """Settings that make a run of 60 steps."""
    return (
        "epochs=12", "batch_size=384", "log_every=1", "data.image_size=16", "model.dim=16",
        "model.image.config.width=4", "order.canonical_shards=12", "checkpoint.every_steps=3",
    )  # fmt: skip


@pytest.fixture(scope="session")
def command(pairs_dataset, settings):
    """Return a function that gives the arguments that start a run, or go on with it."""
    return lambda run: ("train", "--data", pairs_dataset.path, "--out", run.path, "--resume", *sets(*settings))


@pytest.fixture(scope="session")
def start(command):
    """Return a function that starts equally many ranks of a run on each host, as srun does."""

    def start(run, hosts, each=1, **environment):
        shared = {"WORLD_SIZE": each * len(hosts), "LOCAL_WORLD_SIZE": each, "MASTER_ADDR": hosts[0].name}
        shared |= {"MASTER_PORT": free_port()} | environment
        return [
            host.start(*command(run), **shared, RANK=each * place + local, LOCAL_RANK=local)
            for place, host in enumerate(hosts)
            for local in range(each)
        ]

    return start


@pytest.fixture(scope="session")
def whole(hosts, start, tmp_path_factory):
    """Return a function that gives the run that so many ranks make on one host."""

    @cache
    def whole(ranks):
        run = RunDirectory(tmp_path_factory.mktemp("whole") / "run")
        finish(start(run, hosts[:1], each=ranks))
        return run

    return whole
