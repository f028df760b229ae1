"""Runs that leave samples out: their places in the order are holes, and nothing of them is read."""

import os
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.order.order import Order
from thermopile.state_store.reader import StateReader
from thermopile.storage.local import LocalPath
from thermopile.storage.selection import ABOUT, WITHOUT, Selection, SelectionError, SelectionWriter
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.selection_files import write_selection
from thermopile.trainer.run.starting import compare, complete
from thermopile.trainer.run_directory import RunDirectory

from support.damage import overwritten
from support.datasets import named_ids
from support.runs import OFTEN, assert_same_run, losses, small, stopped, train

FORGOTTEN = np.random.default_rng(0).permutation(2_000)[:300]
WINDOWED = {
    "batch_size": 64, "order": {"canonical_shards": 2, "blocks_per_shard": 6, "window_blocks": 2}, "micro_batch": 16,
    "state": {"memory_budget": "45KB"}, "checkpoint": {"every_steps": 8}, "epochs": 1,
}  # fmt: skip


@pytest.fixture
def named(pairs_dataset, tmp_path):
    """Return a function that writes ids to a file and returns it as text."""

    def named(ids, name="forgotten.parquet"):
        pq.write_table(named_ids(pairs_dataset, ids), tmp_path / name)
        return str(tmp_path / name)

    return named


def without(dataset, file, select="", **more):
    """Settings of a run that leaves out the samples of a file."""
    data = {"path": str(dataset.path), "image_size": 16, "without": file, "select": select}
    return small(dataset, **{"data": data} | more)


def steps_of(run):
    """The last step of each sample, 0 for one that was never trained on."""
    return StateReader.open(run.state).column("last_step")


def test_the_others_are_trained_on_in_the_steps_in_which_they_would_be_anyway(finished, pairs_dataset, named, tmp_path):
    run = train(without(pairs_dataset, named(FORGOTTEN)), tmp_path / "run")
    others = np.setdiff1d(np.arange(2_000), FORGOTTEN)
    np.testing.assert_array_equal(steps_of(run)[others], steps_of(finished)[others])
    assert not StateReader.open(run.state).stored("last_step")[:][FORGOTTEN].any()
    assert losses(run).keys() == losses(finished).keys()
    assert losses(run)[1] != losses(finished)[1]
    np.testing.assert_array_equal(Selection(run.selection).without, np.sort(FORGOTTEN))


@pytest.mark.parametrize(
    "more", [{}, pytest.param(WINDOWED, marks=pytest.mark.wide)], ids=["in memory", "in windows and pieces"]
)
def test_no_bit_of_the_run_depends_on_what_the_forgotten_samples_were(pairs_dataset, named, tmp_path, more):
    gone, file = overwritten(pairs_dataset, FORGOTTEN, tmp_path / "gone"), named(FORGOTTEN)
    run = train(without(gone, file, **more), tmp_path / "run")
    assert_same_run(run, train(without(pairs_dataset, file, **more), tmp_path / "whole"))


@pytest.mark.wide
def test_a_stopped_run_goes_on_as_if_it_had_not_been(pairs_dataset, named, tmp_path):
    kept = named(np.arange(3, 1_990), "kept.parquet")
    config = without(pairs_dataset, named(FORGOTTEN), kept, **WINDOWED)
    whole = train(config, tmp_path / "whole")
    run = stopped(config, tmp_path / "run", 11)
    train(config, run, resume=True)
    assert_same_run(run, whole)
    ids = np.intersect1d(FORGOTTEN, np.arange(3, 1_990))
    np.testing.assert_array_equal(Selection(run.selection).without, ids - 3)
    assert not steps_of(run)[FORGOTTEN].any()


# What such a run refuses


def test_a_resumed_run_refuses_other_holes_and_a_damaged_copy(pairs_dataset, named, tmp_path):
    run = stopped(without(pairs_dataset, named(FORGOTTEN), **OFTEN), tmp_path / "run", 3)
    recorded = run.config()
    for other in (named(FORGOTTEN[1:], "other.parquet"), ""):
        data = recorded.data.model_copy(update={"without": other})
        asked, _ = complete(recorded.model_copy(update={"data": data}), pairs_dataset, recorded=recorded)
        with pytest.raises(ConfigError, match=r"data\.without: .* \(cannot change: .* thermopile fork RUN --out NEW"):
            compare(run.path, recorded, asked, [])
    file = run.selection / "without.int64"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(SelectionError, match=r"without\.int64 is damaged: it has 2,392 bytes instead of 2,400"):
        Trainer.open(recorded, run, resume=True)


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (np.arange(2_000), r"names every sample that is trained on; choose other samples"),
        ([0, 1, 2_000], "--without .* has sample 2,000, but the dataset has the ids 0 … 1,999"),
        (
            np.arange(250),
            r"data\.without: step 1 would keep 0 of its 32 samples of a canonical shard, but needs 2",
        ),
    ],
)
def test_holes_that_leave_too_little_are_refused_and_leave_no_run(pairs_dataset, named, tmp_path, ids, match):
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match=match):
        Trainer.open(without(pairs_dataset, named(ids)), run)
    assert not run.exists()


def test_a_step_that_one_rank_s_piece_makes_too_thin_is_refused_with_its_own_cure(tmp_path):
    order = Order.create(4_000, 64, canonical_shards=2)
    gone = order.batch_ids(0, 3)[32:48]
    order.refuse_thin_steps(gone, 0, 100, pieces=2)
    with pytest.raises(ValueError, match=r"step 4 would keep 0 of its 8 samples of a rank's piece.*use fewer ranks"):
        order.refuse_thin_steps(gone, 0, 100, pieces=8)
    with pytest.raises(ValueError, match="ids -1 to 5 of 4,000 samples"):
        order.places_of(np.array([5, -1]), 0)


def test_a_refused_start_hides_no_samples_of_a_run_that_is_then_started_there(pairs_dataset, named, tmp_path):
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match="would keep 0"):
        Trainer.open(without(pairs_dataset, named(np.arange(250))), run)
    with Trainer.open(small(pairs_dataset), run):
        assert StateReader.open(run.state).kept == 2_000


@pytest.mark.parametrize("holes", [[-1, 5], [5, 2_000], [5, 2**62], [7, 5], [5, 5]])
def test_holes_that_are_no_ascending_positions_are_refused(tmp_path, holes):
    with SelectionWriter(LocalPath(tmp_path / "selection"), 2_000) as writer:
        writer.add(WITHOUT, [np.array(holes)])
        writer.finish()
    with pytest.raises(SelectionError, match=r"without\.int64 is damaged: .* 0 … 1,999"):
        Selection(LocalPath(tmp_path / "selection")).are_present(np.arange(3))


def test_holes_outside_the_selection_are_no_holes_and_a_file_of_them_alone_is_refused(pairs_dataset, named, tmp_path):
    kept = named(np.arange(1_000, 2_000), "kept.parquet")
    with pytest.raises(ConfigError, match="names no sample that is trained on"):
        Trainer.open(without(pairs_dataset, named([1, 2, 3]), kept), RunDirectory(tmp_path / "run"))


def test_what_cannot_take_batches_of_different_sizes_is_refused(pairs_dataset, named):
    file = named(FORGOTTEN)
    with pytest.raises(ConfigError, match="compile = true is for batches of one size"):
        without(pairs_dataset, file, compile=True)
    of_one_size = {"name": "support.own_code:OfOneSize"}
    small(pairs_dataset, objective=of_one_size)
    with pytest.raises(ConfigError, match=r"OfOneSize. fails on a batch of 3: RuntimeError"):
        without(pairs_dataset, file, objective=of_one_size)


# What the other commands say of it


def test_rows_of_forgotten_samples_read_as_never_visited_whatever_they_hold(finished, pairs_dataset, named, tmp_path):
    run = RunDirectory(shutil.copytree(finished.path, tmp_path / "run"))
    state, before = StateReader.open(run.state), StateReader.open(run.state).rows(0, 2_000)
    assert (state.kept, state.is_kept(0, 2_000).all()) == (2_000, True)
    write_selection(without(pairs_dataset, named(FORGOTTEN)).data, pairs_dataset, run.selection)
    state, gone = StateReader.open(run.state), np.isin(np.arange(2_000), FORGOTTEN)
    np.testing.assert_array_equal(state.is_kept(0, 2_000), ~gone)
    assert state.kept == 1_700
    for name, values in before.items():
        initial = state.initial.get(name, 0)
        for read in (state.column(name), state.rows_at(np.arange(2_000))[name], state.array(name)[:]):
            np.testing.assert_array_equal(read, np.where(gone, np.asarray(initial, values.dtype), values))


def test_a_new_run_leaves_files_of_others_in_a_folder_of_that_name(pairs_dataset, tmp_path):
    (tmp_path / "run" / "selection").mkdir(parents=True)
    (tmp_path / "run" / "selection" / "mine").write_text("mine")
    with Trainer.open(small(pairs_dataset), RunDirectory(tmp_path / "run")):
        assert (tmp_path / "run" / "selection" / "mine").read_text() == "mine"


def test_a_run_with_a_selection_is_refused_rather_than_removing_files_of_others(pairs_dataset, named, tmp_path):
    (tmp_path / "run" / "selection").mkdir(parents=True)
    (tmp_path / "run" / "selection" / "mine").write_text("mine")
    with pytest.raises(SelectionError, match="holds mine"):
        Trainer.open(without(pairs_dataset, named(FORGOTTEN)), RunDirectory(tmp_path / "run"))
    assert (tmp_path / "run" / "selection" / "mine").read_text() == "mine"


def test_what_a_killed_start_left_half_written_keeps_no_selection_from_being_written(pairs_dataset, named, tmp_path):
    (tmp_path / "run" / "selection").mkdir(parents=True)
    (tmp_path / "run" / "selection" / ".mixture.json.host-1234abcd-99.partial").write_text("{")
    with Trainer.open(without(pairs_dataset, named(FORGOTTEN)), RunDirectory(tmp_path / "run")):
        assert {*os.listdir(tmp_path / "run" / "selection")} == {ABOUT, WITHOUT}
