"""A check of a snapshot finds every value and file that is not as it should be, and names it."""

import os
from dataclasses import replace

import numpy as np
import pytest
import zarr

from thermopile.state_store import history, icechunk_files
from thermopile.state_store.check import check_snapshot
from thermopile.state_store.durable import Repository
from thermopile.state_store.reader import StateReader

from support.commits import commit
from support.damage import cut_short, flip
from support.sound_state import BLOCK, SAMPLES, STEP, sound_columns, write_columns

BOUNDS = {"tau_min": 0.005, "tau_max": 1.0}


@pytest.fixture
def write_state(path):
    """Write a state with these columns, and return its path."""

    def write(columns):
        write_columns(path, columns)
        return path

    return write


def check(path, bounds=BOUNDS):
    return check_snapshot(StateReader.open(path), bounds, lambda done: None)


def problems(report):
    return {
        (column.name, problem.what, problem.chunk, problem.rows, problem.first_ids)
        for column in report.columns
        for problem in column.problems
    }


def test_a_sound_state_has_no_problem_and_its_figures_are_counted(write_state):
    seen = []
    report = check_snapshot(StateReader.open(write_state(sound_columns())), BOUNDS, seen.append)
    assert (report.sound, report.other_problems, seen) == (True, [], [300, 600, 900, 1000])
    assert [(column.rows, column.unseen) for column in report.columns] == [(1000, 334)] * 5
    assert (report.columns[1].lowest, report.columns[1].highest) == (np.float32(0.005), 1.0)


# A visited sample has an id that 3 does not divide. Every rule: column, ids, the value they get, what is said of them.
FAULTS = {
    "not a number": ("image/u", [301, 304], np.nan, "not finite"),
    "infinite": ("image/tau", [1, 2, 4], np.inf, "not finite"),
    "minus infinity in an unseen row": ("image/u", [3], -np.inf, "not finite"),
    "visited, but still at minus infinity": ("image/log_s", [901], -np.inf, "visited, but still -inf"),
    "unseen, but written": ("image/log_s", [600, 603], 0.5, "never visited, but not at the initial value -inf"),
    "too low": ("image/tau", [304], 0.004, "below tau_min 0.005"),
    "too high": ("image/tau", [304], 1.01, "above tau_max 1"),
    "from the future": ("last_step", [997], STEP + 1, "later than the snapshot's step 7"),
    "visited, but at no step": ("last_step", [1], 0, "visited, but without a last step"),
    "unseen, but with a step": ("last_step", [3], 1, "never visited, but with a last step"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_value_against_the_rules_is_found_with_its_chunk_and_ids(write_state, fault):
    column, ids, value, what = fault
    columns = sound_columns()
    columns[column][ids] = value
    report = check(write_state(columns))
    assert not report.sound
    assert problems(report) == {(column, what, ids[0] // BLOCK, len(ids), tuple(ids))}


def test_of_many_rows_five_are_named_and_of_many_problems_twenty_are_listed(write_state):
    columns = sound_columns(samples=30 * BLOCK)
    columns["image/u"][:] = np.nan
    found = check(write_state(columns)).columns[2]
    assert (len(found.problems), found.problems_not_listed) == (20, 10)
    assert (found.problems[1].rows, found.problems[1].first_ids) == (300, (300, 301, 302, 303, 304))
    assert (found.lowest, found.highest) == (None, None)


def test_tau_may_stand_at_its_initial_value_outside_the_bounds(write_state):
    found = problems(check(write_state(sound_columns()), BOUNDS | {"tau_min": 0.06}))
    below = np.flatnonzero(sound_columns()["image/tau"][:BLOCK] < np.float32(0.06))
    below = below[below % 3 > 0]
    assert found == {("image/tau", "below tau_min 0.06", 0, len(below), tuple(below[:5].tolist()))}


def test_tau_is_not_compared_with_a_bound_that_is_not_known(write_state):
    columns = sound_columns()
    columns["image/tau"][[1, 304]] = 50.0, 0.001
    path = write_state(columns)
    assert [what for _, what, *_ in problems(check(path, {"tau_min": 0.005}))] == ["below tau_min 0.005"]
    assert check(path, {}).sound


@pytest.mark.parametrize("damage", [cut_short, flip, os.unlink])
def test_a_damaged_chunk_is_named_with_its_file_and_the_others_are_still_checked(write_state, damage):
    columns = sound_columns()
    columns["image/tau"][304] = 9.0
    path = write_state(columns)
    of_u = columns["image/u"][300:600].tobytes()
    (file,) = (file for file in (path / "chunks").iterdir() if file.read_bytes().startswith(of_u))
    damage(file)
    report = check(path)
    assert [column.rows for column in report.columns] == [1000, 1000, 700, 1000, 1000]
    ((name, what, chunk, *_),) = (found for found in problems(report) if found[0] == "image/u")
    assert (name, chunk) == ("image/u", 1)
    assert what.startswith(f"array 'image/u', chunk 1 (rows 300 … 599) cannot be read: chunks/{file.name} in")
    assert ("image/tau", "above tau_max 1", 1, 1, (304,)) in problems(report)


def test_with_its_visits_unreadable_a_block_is_checked_for_the_rest(write_state):
    columns = sound_columns()
    columns["image/log_s"][[301, 302]] = [-np.inf, np.nan]
    path = write_state(columns)
    visits = columns["visits"][300:600].tobytes()
    for file in (path / "chunks").iterdir():
        if file.read_bytes().startswith(visits):
            file.unlink()
    found = problems(check(path))
    assert {(name, chunk) for name, _, chunk, *_ in found} == {("visits", 1), ("image/log_s", 1)}
    assert ("image/log_s", "not finite", 1, 1, (302,)) in found


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"shape": (999,)}, "its shape is (999,), but should be (1000,)"),
        ({"dtype": "float64"}, "its dtype is float64, but should be float32"),
        ({"chunks": (100,)}, "its chunks is (100,), but should be (300,)"),
        (None, "is missing"),
    ],
)
def test_an_array_that_is_not_what_the_store_was_made_for_is_found(write_state, changes, what):
    path = write_state(sound_columns())
    loaded, _ = history.load(path)
    icechunk_files.point_reference_at(path, loaded.snapshots[-1].id)
    session = icechunk_files.open_repository(path).writable_session("main")
    group = zarr.open_group(session.store)
    del group["image/u"]
    if changes:
        group.create_array("image/u", **{"shape": (SAMPLES,), "dtype": "float32", "chunks": (BLOCK,)} | changes)
    snapshot_id = session.flush("by hand")
    _, files = icechunk_files.written_files(path, snapshot_id, {})
    by_hand = replace(loaded.snapshots[-1], id=snapshot_id, step=8, files=files)
    history.replace(path, replace(loaded, snapshots=(*loaded.snapshots, by_hand)))
    report = check(path)
    ((name, said, *_),) = problems(report)
    assert name == "image/u"
    assert said.startswith("array 'image/u'")
    assert what in said
    assert [column.rows for column in report.columns] == [1000, 1000, 0, 1000, 1000]


def test_a_snapshot_of_another_dataset_than_the_store_is_a_problem(write_state):
    path = write_state(sound_columns())
    commit(Repository(path), 8, [], dataset_fingerprint="glyphs-2")
    report = check(path)
    assert not report.sound
    assert report.other_problems == ["the state is for dataset glyphs-1…, but this snapshot is for glyphs-2…"]
