"""A dataset, a run and its state at Google's and Azure's addresses; not their stores: a stub, and an emulator."""

import pytest

from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.opening import Dataset
from thermopile.storage.bucket import Address
from thermopile.trainer.run_directory import RunDirectory

from support.cli import succeed
from support.runs import assert_same_run, resumed, small, stopped

pytestmark = pytest.mark.wide


def test_a_run_that_stops_goes_on_and_is_read_and_forked(other_cloud, pairs_dataset, whole, tmp_path):
    place = Address("bucket", "dataset", scheme=other_cloud)
    dataset = Dataset(uploaded(pairs_dataset.path, place))
    often = {"checkpoint": {"every_steps": 4, "every_minutes": 0, "keep_every": 4}}
    config, run = small(dataset, **often), RunDirectory(place.with_name("run"))
    stopped(config, run, 5)
    resumed(config, run, from_step=4)
    assert_same_run(run, whole)
    succeed("inspect", run.path, "--to", tmp_path / "report")
    succeed("fork", f"{run.path}@step-12", "--out", place.with_name("fork"))
    fork = RunDirectory(place.with_name("fork"))
    resumed(fork.config(), fork, from_step=12)
    assert_same_run(fork, whole)
