"""Runs in a bucket, and one on a disk to compare them with."""

import pytest

from thermopile.storage import bucket
from thermopile.storage.bucket import SCRATCH
from thermopile.trainer.run import checkpoint_writer
from thermopile.trainer.run_directory import RunDirectory

from support.runs import new_run, small, train


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def run(s3):
    return new_run()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Return a function that gives the run as another machine sees it."""

    def move(run, machine="elsewhere"):
        monkeypatch.setenv(SCRATCH, str(tmp_path / machine))
        return RunDirectory(run.path)

    return move


@pytest.fixture(scope="module")
def whole(pairs_dataset, tmp_path_factory):
    """The same run on a disk, with a snapshot of every step."""
    changes = {"checkpoint": {"every_steps": 1, "every_minutes": 0, "keep_every": 1}}
    run = RunDirectory(tmp_path_factory.mktemp("whole") / "run")
    train(small(pairs_dataset, **changes), run)
    return run


@pytest.fixture
def impatient(monkeypatch):
    import icechunk

    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr("thermopile.state_store.icechunk_files._REPEATS", icechunk.StorageRetriesSettings(max_tries=1))
