"""A fork of a run: the run itself from a checkpoint on, but for what was changed."""

import pytest

from thermopile.trainer.run_directory import RunDirectory

from support.cli import succeed
from support.runs import assert_same_run, losses, resumed, small, train

KEEPING = {"checkpoint": {"every_steps": 4, "keep_every": 4}}


@pytest.fixture(scope="module")
def whole(pairs_dataset, tmp_path_factory):
    """A run of 14 steps, with checkpoints at 4, 8, 12 and 14."""
    return train(small(pairs_dataset, **KEEPING), tmp_path_factory.mktemp("whole") / "run")


def fork(source, out, *words):
    succeed("fork", source, "--out", out, *words)
    return RunDirectory(out)


def test_a_fork_without_changes_goes_on_as_the_run_did(whole, tmp_path):
    forked = fork(f"{whole.path}@step-8", tmp_path / "fork")
    assert list(losses(forked)) == list(range(1, 9))
    resumed(forked.config(), forked, from_step=8)
    assert_same_run(forked, whole)
