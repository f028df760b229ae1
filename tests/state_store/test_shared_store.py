"""A store that two processes share, against one of a single process that trains in the same order."""

import numpy as np
import pytest

from thermopile.state_store.commit import array_of
from thermopile.state_store.durable import Repository, list_snapshots
from thermopile.state_store.ranks import Ranks
from thermopile.state_store.reader import StateReader
from thermopile.state_store.schema import Description

from support.programs import two_ranks

ORDER, KINDS = two_ranks.ORDER, sorted(two_ranks.BUDGETS)
COLUMNS = [*two_ranks.FIELDS, "visits", "last_step"]
TWO_TRAINED, ONE_TRAINED, TWO_WENT_ON = 20, 30, 40


@pytest.fixture(scope="module")
def run_two(start, tmp_path_factory):
    """Call a function of the program in two ranks; return what each returned."""
    meeting_point = tmp_path_factory.mktemp("ranks") / "meeting_point"
    both = [start(two_ranks.serve, rank, meeting_point)[1] for rank in range(2)]

    def run(function, *arguments):
        for connection in both:
            connection.send((function, arguments))
        assert all(connection.poll(60) for connection in both), "a rank waits for ever"
        return [connection.recv() for connection in both]

    return run


# Snapshots that both commit

ROW_BYTES = 3 * 4


def test_a_run_of_one_process_hears_itself():
    alone = Ranks()
    assert (alone.rank, alone.world) == (0, 1)
    assert alone.broadcast("value") == "value"
    assert alone.gather("value") == ["value"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    description = Description(two_ranks.SAMPLES, two_ranks.SCHEMA, two_ranks.BLOCK_ROWS, "glyphs-1")
    return Repository.create(tmp_path_factory.mktemp("commits") / "state", description)


@pytest.fixture(scope="module")
def told(repository, run_two):
    """What rank 0 and rank 1 made of each commit of the program."""
    first, second = run_two(two_ranks.commit_all, repository.path)
    return {name: (first[name], second[name]) for name in first}


def column(repository, at):
    return array_of(repository.group(repository.resolve(at)), "image/tau")[:]


def test_the_rows_of_all_ranks_are_in_one_snapshot(repository, told):
    assert told["both"] == (["step-1", 2_000 * ROW_BYTES],) * 2
    np.testing.assert_array_equal(column(repository, "step-1"), np.repeat([10, 11], [1_024, 976]))
    assert repository.resolve("step-1").epoch == 1


def test_a_rank_may_have_nothing_to_write(repository, told):
    assert told["rank 0 alone has rows"] == (["step-2", 1_024 * ROW_BYTES],) * 2
    np.testing.assert_array_equal(column(repository, "step-2"), np.repeat([20, 11], [1_024, 976]))


@pytest.mark.parametrize(("commit", "failing"), [("rank 0 fails", {0}), ("rank 1 fails", {1}), ("both fail", {0, 1})])
def test_when_a_rank_fails_every_rank_is_told_which_and_why(repository, told, commit, failing):
    def message(rank):
        return (
            f"{repository.path}: the snapshot of step 3, which builds on step-2, was not written: UnpicklableError: "
            f"rank {rank} lost its rows"
        )

    for rank, [raised] in enumerate(told[commit]):
        assert raised == (message(rank) if rank in failing else f"rank {1 - rank}: {message(1 - rank)}")


def test_a_failed_commit_leaves_no_tag_and_the_next_one_goes_on(repository, told):
    assert told["after the failures"] == (["step-3", 2_000 * ROW_BYTES],) * 2
    assert [snapshot.tag for snapshot in repository.snapshots()] == ["step-0", "step-1", "step-2", "step-3"]
    np.testing.assert_array_equal(column(repository, "step-3"), np.repeat([30, 31], [1_024, 976]))
    chunks = list((repository.path / "chunks").iterdir())
    assert len(chunks) == 3 * (8 + 4 + 8), "columns × blocks of the three snapshots"


# Stores that both train


def take_all(store):
    """Every row of the store, taken a block at a time: more a memory budget need not hold."""
    ids = np.arange(ORDER.samples)
    blocks = [store.take(ids[first : first + ORDER.block_rows]) for first in range(0, len(ids), ORDER.block_rows)]
    return {name: np.concatenate([block[name].numpy() for block in blocks]) for name in blocks[0]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The store of a process that made all the steps by itself."""
    path = tmp_path_factory.mktemp("alone") / "state"
    with two_ranks.store_at(path, "resident", Ranks()) as store:
        two_ranks.train(store, Ranks(), TWO_WENT_ON)
    return path


@pytest.fixture(scope="module")
def shared(run_two, tmp_path_factory):
    """Stores that two processes trained, then one, then two again; the rows between, and which moved blocks."""
    directory, taken = tmp_path_factory.mktemp("shared"), {}
    moved = run_two(two_ranks.train_both_kinds, directory, TWO_TRAINED)
    for kind in KINDS:
        with two_ranks.store_at(directory / kind, kind, Ranks()) as store:
            taken[kind] = take_all(store)
            two_ranks.train(store, Ranks(), ONE_TRAINED)
    moved += run_two(two_ranks.train_both_kinds, directory, TWO_WENT_ON)
    return directory, taken, moved


@pytest.mark.wide
@pytest.mark.parametrize("step", [TWO_TRAINED, ONE_TRAINED, TWO_WENT_ON])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_that_of_a_run_of_one_process(alone, shared, kind, step):
    ours, expected = StateReader.open(shared[0] / kind, f"step-{step}"), StateReader.open(alone, f"step-{step}")
    for name in COLUMNS:
        np.testing.assert_array_equal(ours.column(name), expected.column(name), err_msg=name)


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_takes_the_rows_that_two_have_put(alone, shared, kind):
    expected = StateReader.open(alone, f"step-{TWO_TRAINED}")
    for name, rows in shared[1][kind].items():
        np.testing.assert_array_equal(rows, expected.column(name), err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_delete_the_snapshots_that_need_not_be_kept(shared, kind):
    assert [snapshot.step for snapshot in list_snapshots(shared[0] / kind)] == [0, 10, 20, 30, 40]


def test_only_windowed_ranks_read_and_write_blocks(shared):
    assert shared[2] == 4 * [{"resident": (False, False), "windowed": (True, True)}]


# Settings that one rank has wrong

ERRORS = {
    "dataset_fingerprint": ("StoreMismatchError", "the store has shared, this run has another"),
    "device": ("RuntimeError", "no such device"),
    "memory_budget": ("MemoryBudgetError", "a memory budget of 1 bytes"),
}


@pytest.fixture(scope="module")
def refusals(run_two, tmp_path_factory):
    """What either rank raised, by what was wrong and on which rank."""
    return run_two(two_ranks.make_mistakes, tmp_path_factory.mktemp("refusals"))


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(("call", "setting"), [(call, setting) for call, setting, _ in two_ranks.MISTAKES])
def test_what_is_wrong_on_one_rank_is_raised_by_both_and_both_can_try_again(refusals, call, setting, wrong):
    raised = [of_rank[call, setting, wrong] for of_rank in refusals]
    own_error, own_reason = raised[wrong]
    error, reason = ERRORS[setting]
    assert own_error == error
    assert reason in own_reason
    assert raised[1 - wrong] == ("StateStoreError", f"rank {wrong}: {own_reason}")
