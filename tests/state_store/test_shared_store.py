"""A store that two processes share, against one of a single process that trains in the same order."""

import importlib.util
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from thermopile.state_store import StateReader, list_snapshots
from thermopile.state_store.ranks import Alone

PROGRAM = Path(__file__).with_name("shared_store_run.py")
_spec = importlib.util.spec_from_file_location("shared_store_run", PROGRAM)
shared_store_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared_store_run)

ORDER, KINDS = shared_store_run.ORDER, sorted(shared_store_run.BUDGETS)
COLUMNS = [*shared_store_run.FIELDS, "visits", "last_step"]
TWO_TRAINED, ONE_TRAINED, TWO_WENT_ON = 40, 60, 80


def run_two(directory, *task):
    """Run the program in two processes; return what each told, or kill both where one waits for ever."""
    meeting_point = directory / f"meeting point {' '.join(task)}"
    with ExitStack() as processes:
        both = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(rank), str(meeting_point), str(directory), *task],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for process in both:
            processes.enter_context(process)
            processes.callback(process.kill)
        outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return [[json.loads(line) for line in output.splitlines()] for output in outputs]


def take_all(store):
    """Every row of the store, taken a block at a time: more a memory budget need not hold."""
    ids = np.arange(ORDER.samples)
    blocks = [store.take(ids[first : first + ORDER.block_rows]) for first in range(0, len(ids), ORDER.block_rows)]
    return {name: np.concatenate([block[name].numpy() for block in blocks]) for name in blocks[0]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The store of a process that made all the steps by itself."""
    path = tmp_path_factory.mktemp("alone") / "state"
    with shared_store_run.store_at(path, "resident", Alone()) as store:
        shared_store_run.train(store, Alone(), TWO_WENT_ON)
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Stores that two processes trained, then one, then two again; and what was told of each on the way."""
    directory, told = tmp_path_factory.mktemp("shared"), {}
    told["two"] = run_two(directory, "train", str(TWO_TRAINED))
    for kind in KINDS:
        with shared_store_run.store_at(directory / kind, kind, Alone()) as store:
            told[kind] = take_all(store)
            shared_store_run.train(store, Alone(), ONE_TRAINED)
    told["two again"] = run_two(directory, "train", str(TWO_WENT_ON))
    return directory, told


@pytest.mark.parametrize("step", [TWO_TRAINED, ONE_TRAINED, TWO_WENT_ON])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_that_of_a_run_of_one_process(alone, shared, kind, step):
    directory, _ = shared
    ours, expected = StateReader.open(directory / kind, f"step-{step}"), StateReader.open(alone, f"step-{step}")
    for name in COLUMNS:
        np.testing.assert_array_equal(ours.column(name), expected.column(name), err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_takes_the_rows_that_two_have_put(alone, shared, kind):
    _, told = shared
    expected = StateReader.open(alone, f"step-{TWO_TRAINED}")
    for name, rows in told[kind].items():
        np.testing.assert_array_equal(rows, expected.column(name), err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_snapshots_kept_are_those_that_were_to_be(shared, kind):
    directory, _ = shared
    assert [snapshot.step for snapshot in list_snapshots(directory / kind)] == [0, 20, 40, 60, 80]


def test_only_windowed_ranks_read_and_write_blocks(shared):
    _, told = shared
    assert told["two"] == told["two again"] == 2 * [[["resident", False, False], ["windowed", True, True]]]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """What either rank raised, by what was wrong: {what: (of rank 0, of rank 1)}."""
    outputs = run_two(tmp_path_factory.mktemp("refusals"), "refuse")
    return {first[0]: (first[1:], second[1:]) for first, second in zip(*outputs, strict=True)}


ERRORS = {
    "dataset_fingerprint": ("StoreMismatchError", "the store has shared, this run has another"),
    "device": ("RuntimeError", "no such device"),
    "memory_budget": ("MemoryBudgetError", "a memory budget of 1 bytes"),
}


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(("call", "setting"), [(call, setting) for call, setting, _ in shared_store_run.MISTAKES])
def test_what_is_wrong_on_one_rank_is_raised_by_both_and_both_can_try_again(refusals, call, setting, wrong):
    raised = refusals[f"{call}, {setting} of rank {wrong}"]
    (own_error, own_reason), other = raised[wrong], raised[1 - wrong]
    error, reason = ERRORS[setting]
    assert own_error == error
    assert reason in own_reason
    assert other == ["StateStoreError", f"rank {wrong}: {own_reason}"]
