import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from thermopile.state_store.commit import array_of
from thermopile.state_store.durable import Repository
from thermopile.state_store.ranks import Alone
from thermopile.state_store.schema import Description

PROGRAM = Path(__file__).with_name("ranks_run.py")
_spec = importlib.util.spec_from_file_location("ranks_run", PROGRAM)
ranks_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks_run)

ROW_BYTES = 3 * 4


def test_a_run_of_one_process_hears_itself():
    alone = Alone()
    assert (alone.rank, alone.world) == (0, 1)
    assert alone.broadcast("value") == "value"
    assert alone.gather("value") == ["value"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "state"
    return Repository.create(path, Description(ranks_run.SAMPLES, ranks_run.SCHEMA, ranks_run.BLOCK_ROWS, "glyphs-1"))


@pytest.fixture(scope="module")
def told(repository):
    """Return for each commit of the program what rank 0 and rank 1 made of it."""
    meeting_point = repository.path.with_name("meeting_point")
    processes = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(rank), str(meeting_point), str(repository.path)],
                         stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    lines = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    return {first[0]: (first[1:], second[1:]) for first, second in zip(*lines, strict=True)}


def column(repository, at):
    return array_of(repository.group(repository.resolve(at)), "image/tau")[:]


def test_the_rows_of_all_ranks_are_in_one_snapshot(repository, told):
    assert told["both"] == (["step-1", 2_000 * ROW_BYTES],) * 2
    np.testing.assert_array_equal(column(repository, "step-1"), np.repeat([10, 11], [1_024, 976]))
    assert repository.resolve("step-1").epoch == 1


def test_a_rank_may_have_nothing_to_write(repository, told):
    assert told["rank 0 alone has rows"] == (["step-2", 1_024 * ROW_BYTES],) * 2
    np.testing.assert_array_equal(column(repository, "step-2"), np.repeat([20, 11], [1_024, 976]))


def lost(rank):
    return (
        f"the snapshot of step 3, which builds on step-2, was not written: UnpicklableError: rank {rank} lost its rows"
    )


@pytest.mark.parametrize(("commit", "failing"), [("rank 0 fails", {0}), ("rank 1 fails", {1}), ("both fail", {0, 1})])
def test_when_a_rank_fails_every_rank_is_told_which_and_why(repository, told, commit, failing):
    for rank, [message] in enumerate(told[commit]):
        if rank in failing:
            assert message == f"{repository.path}: {lost(rank)}"
        else:
            assert message == f"rank {1 - rank}: {repository.path}: {lost(1 - rank)}"


def test_a_failed_commit_leaves_no_tag_and_the_next_one_goes_on(repository, told):
    assert told["after the failures"] == (["step-3", 2_000 * ROW_BYTES],) * 2
    assert [snapshot.tag for snapshot in repository.snapshots()] == ["step-0", "step-1", "step-2", "step-3"]
    np.testing.assert_array_equal(column(repository, "step-3"), np.repeat([30, 31], [1_024, 976]))
    chunks = list((repository.path / "chunks").iterdir())
    assert len(chunks) == 3 * (8 + 4 + 8), "columns × blocks of the three snapshots"
