"""A dataset and a run at Amazon's own names: no endpoint is set, and no network but this machine's has them."""

import re
import signal

import pytest

from thermopile.storage.bucket import Address
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.hosts import COMPARE, WAIT_FOR_CHECKPOINT, network
from support.runs import SMALL, finish
from support.started import COMMAND_LINE

pytestmark = pytest.mark.wide

WITHOUT_ENDPOINT = "os.environ.pop('AWS_ENDPOINT_URL', None)\n"


@pytest.fixture(scope="module")
def amazon(start_program, tmp_path_factory):
    """Return a function that starts `thermopile ARGUMENTS` on a host that reaches Amazon's names."""
    with (
        network(["amy"], tmp_path_factory.mktemp("disk"), start_program) as made,
        made.amazon(tmp_path_factory.mktemp("certificates")) as variables,
    ):

        def start(*arguments, code=COMMAND_LINE, **more):
            return made.hosts[0].start(*arguments, code=WITHOUT_ENDPOINT + code, **variables | more)

        yield start


@pytest.mark.timeout(900)  # ten programs, one after the other
def test_a_run_is_converted_trained_killed_resumed_inspected_and_forked(amazon, of_tars, tmp_path):
    tars, _ = of_tars
    finish([amazon("convert", "webdataset", tars[0].parent, "s3://bucket/set", "--workers", 1)])
    run, often = RunDirectory(Address("bucket", "run")), sets(*SMALL, "batch_size=64", "checkpoint.every_steps=2")
    train = ("train", "--data", "s3://bucket/set", "--resume", *often)
    killed = amazon(*train, "--out", run.path)
    finish([amazon(run.path, code=WAIT_FOR_CHECKPOINT)])
    killed.kill()
    assert killed.end()[0] == -signal.SIGKILL
    (_, said), (_, _) = finish([amazon(*train, "--out", run.path), amazon(*train, "--out", tmp_path / "whole")])
    assert re.search(r"resuming at step [1-9]", said)
    finish([amazon(run.path, tmp_path / "whole", code=COMPARE)])
    finish([amazon("inspect", run.path, "--to", tmp_path / "report")])
    fork = Address("bucket", "fork")
    finish([amazon("fork", f"{run.path}@step-16", "--out", fork)])
    finish([amazon("train", "--out", fork, "--resume")])
    finish([amazon(run.path, fork, code=COMPARE)])
