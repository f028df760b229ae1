"""Runs on selected samples. The first of their ids is not 0, and they are dense in one place and sparse in another."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.state_store.reader import StateReader
from thermopile.storage.selection import Selection, SelectionError
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run.run_status import read_status
from thermopile.trainer.run.selection_files import pinned, write_selection
from thermopile.trainer.run.starting import compare, complete
from thermopile.trainer.run_directory import RunDirectory

from support.runs import assert_same_run, losses, small, stopped, train

KEPT = np.concatenate([np.arange(3, 700), np.arange(700, 1_990, 9)])
WINDOWED = {
    "batch_size": 64, "order": {"canonical_shards": 2, "blocks_per_shard": 6, "window_blocks": 2},
    "state": {"memory_budget": "20KB"},
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """Return a function that writes ids, and weights if given, to a file and returns it as text."""

    def write(ids, weights=None, name="kept.parquet", **more):
        columns = {"sample_id": ids} | ({} if weights is None else {"weight": weights}) | more
        pq.write_table(pa.table(columns), tmp_path / name, row_group_size=100)
        return str(tmp_path / name)

    return write


def on(dataset, select, **more):
    """Settings of a run on selected samples, a few steps an epoch."""
    data = {"path": str(dataset.path), "image_size": 16, "select": select}
    return small(dataset, **{"batch_size": 64, "data": data} | more)


def test_a_run_visits_the_selected_samples_only_each_once_an_epoch(pairs_dataset, write, tmp_path):
    config = on(pairs_dataset, write(np.random.default_rng(0).permutation(KEPT), reason=["why"] * len(KEPT)))
    run = train(config, tmp_path / "run")
    state = StateReader.open(run.state)
    visits = state.column("visits")
    steps = len(losses(run))
    assert (state.samples, state.kept) == (2_000, len(KEPT))
    assert steps == 2 * (len(KEPT) // 8 // 8)
    assert visits.sum() == 64 * steps
    assert set(np.flatnonzero(visits)) <= set(KEPT)
    assert visits.max() == 2
    assert np.isneginf(state.column("image/log_s")[visits == 0]).all()
    np.testing.assert_array_equal(Selection(run.selection).ids, KEPT)


def test_a_selection_of_all_samples_changes_nothing(finished, pairs_dataset, write, tmp_path):
    config = on(pairs_dataset, write(np.arange(2_000)), batch_size=256)
    run = train(config, tmp_path / "run")
    assert_same_run(run, finished)


@pytest.mark.wide
def test_few_rows_in_memory_give_the_bits_of_all_in_memory_also_when_resumed(pairs_dataset, write, tmp_path):
    config = on(pairs_dataset, write(KEPT), **WINDOWED, checkpoint={"every_steps": 4})
    assert config.order.blocks_per_shard > config.order.window_blocks
    whole = train(config.model_copy(update={"state": small(pairs_dataset).state}), tmp_path / "whole")
    run = stopped(config, tmp_path / "run", 11)
    with Trainer.open(config, run, resume=True) as trainer:
        assert trainer.run.steps_done == 8
        trainer.train()
        assert 0 < trainer.run.store.blocks_read < 3 * 2 * config.order.blocks_per_shard, (
            "the store was not told the windows"
        )
    assert_same_run(run, whole)


# Reading the state of such a run


@pytest.fixture(scope="module")
def selected(pairs_dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("selected")
    pq.write_table(pa.table({"sample_id": KEPT}), folder / "kept.parquet")
    return train(on(pairs_dataset, str(folder / "kept.parquet")), folder / "run")


def test_a_column_can_be_indexed_by_the_ids_of_the_dataset(selected):
    state = StateReader.open(selected.state)
    column, whole = state.array("image/tau"), state.column("image/tau")
    assert (column.shape, column.dtype) == ((2_000,), np.float32)
    rare = np.random.default_rng(0).permutation(2_000)[:50]
    for key in (slice(None), slice(5, 1_995, 7), slice(1_999, 0, -3), rare, rare - 2_000, whole > 0.01, 5, -1):
        np.testing.assert_array_equal(column[key], whole[key])
    np.testing.assert_array_equal(column, whole)
    with pytest.raises(IndexError, match="2000"):
        column[[2_000]]


@pytest.mark.parametrize(("start", "stop"), [(0, 2_000), (0, 3), (2, 5), (690, 720), (1_990, 2_000), (7, 7)])
def test_a_range_of_rows_is_that_part_of_the_columns(selected, start, stop):
    state = StateReader.open(selected.state)
    rows = state.rows(start, stop)
    for name in state.columns:
        np.testing.assert_array_equal(rows[name], state.column(name)[start:stop])
    np.testing.assert_array_equal(state.is_kept(start, stop), np.isin(np.arange(start, stop), KEPT))
    for name, values in state.rows_at(np.arange(start, stop)[::-1]).items():
        np.testing.assert_array_equal(values, rows[name][::-1])


def test_a_state_with_another_runs_selection_or_a_damaged_one_is_refused(selected, pairs_dataset, write, tmp_path):
    run = RunDirectory(shutil.copytree(selected.path, tmp_path / "run"))
    file = run.selection / "ids.int64"
    data = bytearray(file.read_bytes())
    data[4_000] ^= 1
    file.write_bytes(data)
    config = run.config()
    with pytest.raises(SelectionError, match=r"ids\.int64 is damaged: its sha256 differs .*; restore it from a copy"):
        Trainer.open(config, run, resume=True)
    file.write_bytes(data[:-8])
    with pytest.raises(SelectionError, match=r"ids\.int64 is damaged: it has 6,720 bytes instead of 6,728"):
        StateReader.open(run.state).column("visits")
    write_selection(on(pairs_dataset, write(KEPT[:-1])).data, pairs_dataset, run.selection)
    with pytest.raises(
        SelectionError, match=r"is not what config\.toml says: a selection of 840 samples, in ids\.int64\."
    ):
        Trainer.open(config, run, resume=True)
    write_selection(on(pairs_dataset, write(KEPT + 1)).data, pairs_dataset, run.selection)
    with pytest.raises(SelectionError, match="selection is another run's"):
        StateReader.open(run.state)
    shutil.rmtree(run.selection)
    with pytest.raises(SelectionError, match=r"selection\.json is missing; restore it from a copy of the run"):
        StateReader.open(run.state)


# Resuming with another file


def test_a_run_goes_on_with_its_own_copy_and_refuses_another_selection(selected, pairs_dataset, write):
    recorded = selected.config()

    def resumed(select):
        data = recorded.data.model_copy(update={"select": select})
        asked, _ = complete(recorded.model_copy(update={"data": data}), pairs_dataset, recorded=recorded)
        compare(selected.path, recorded, asked, [])
        return asked

    original = recorded.data.select.rpartition("@")[0]
    assert resumed(original) == recorded
    with pytest.raises(ConfigError, match=r"data\.select: .* \(cannot change: the run has its own copy; leave"):
        resumed(write(KEPT[1:]))
    with pytest.raises(ConfigError, match="cannot change"):
        resumed("")
    away = Path(original).rename(f"{original}.away")
    try:
        assert resumed(original) == recorded, "the command that began the run no longer resumes it"
    finally:
        away.rename(original)


# Bad input


def refuses(settings, match, tmp_path):
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match=match):
        Trainer.open(settings(), run)
    assert not run.exists()
    run.refuse_existing()


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (pa.array([5, None, 7] * 100), r"rows without a sample_id \(null\); remove them"),
        ([*range(1_000), 2_000], r"has sample 2,000, but the dataset has the ids 0 … 1,999; use ids of this dataset"),
        ([*range(1_000), -1], r"has sample -1, but"),
        (pa.array([2**64 - 1, *range(999)], pa.uint64()), "has sample 18,446,744,073,709,551,615, but"),
        ([*range(1_000), 7], "has sample 7 more than once; remove repeated rows"),
        (pa.array([], pa.int64()), "has no rows; leave it out"),
        (range(100), r"batch_size 256 exceeds 100 samples; lower it to 16"),
        (np.arange(1_000.0), "the column 'sample_id' is double; it must hold whole numbers"),
    ],
)
def test_a_bad_selection_is_refused_in_one_line_and_leaves_no_run(pairs_dataset, write, tmp_path, ids, match):
    refuses(lambda: on(pairs_dataset, write(ids), batch_size=256), match, tmp_path)


def test_a_file_without_ids_or_no_parquet_file_is_refused(pairs_dataset, tmp_path):
    file = tmp_path / "kept.parquet"
    refuses(lambda: on(pairs_dataset, str(file)), r"kept\.parquet cannot be read: No such file", tmp_path)
    pq.write_table(pa.table({"id": [1]}), file)
    refuses(lambda: on(pairs_dataset, str(file)), r"has no column 'sample_id'; it has id", tmp_path)
    pq.write_table(pa.table([[1], [2]], names=["sample_id"] * 2), file)
    refuses(lambda: on(pairs_dataset, str(file)), r"has 2 columns 'sample_id'; keep one", tmp_path)
    file.write_bytes(b"sample_id\n1\n" * 100)
    refuses(lambda: on(pairs_dataset, str(file)), r"kept\.parquet is not a Parquet file, or is damaged", tmp_path)


def test_a_file_that_changed_since_it_was_recorded_is_refused(pairs_dataset, write, tmp_path):
    config = on(pairs_dataset, write(KEPT))
    write(KEPT[1:])
    with pytest.raises(ConfigError, match=r"has changed: .* Pass it again"):
        Trainer.open(resolve(config, pairs_dataset)[0], RunDirectory(tmp_path / "run"))


@pytest.mark.parametrize("option", ["select", "weights"])
def test_a_file_that_names_another_dataset_is_refused(pairs_dataset, tmp_path, option):
    table, file = pa.table({"sample_id": np.arange(2_000), "weight": np.ones(2_000)}), tmp_path / "kept.parquet"
    for fingerprint in (pairs_dataset.index.fingerprint, "f" * 64):
        pq.write_table(table.replace_schema_metadata({"thermopile.dataset_fingerprint": fingerprint}), file)
        data = resolve(on(pairs_dataset, "", data={"path": str(pairs_dataset.path), option: str(file)}), pairs_dataset)[
            0
        ].data
        if fingerprint == pairs_dataset.index.fingerprint:
            write_selection(data, pairs_dataset, tmp_path / "selection")
    with pytest.raises(ConfigError, match=rf"--{option} .* names samples of another dataset, whose fingerprint is f+…"):
        write_selection(data, pairs_dataset, tmp_path / "selection")


def test_a_long_file_is_read_in_pieces_and_must_be_sorted(pairs_dataset, write, tmp_path, monkeypatch):
    monkeypatch.setattr("thermopile.trainer.run.selection_files.MAX_UNSORTED", 100)
    monkeypatch.setattr("thermopile.trainer.run.selection_files.ROWS_AT_ONCE", 64)
    data = on(pairs_dataset, write(KEPT)).data
    write_selection(data, pairs_dataset, tmp_path / "selection")
    np.testing.assert_array_equal(Selection(tmp_path / "selection").ids, KEPT)
    for ids, match in (
        (KEPT[::-1], r"has 841 rows that are not sorted; above 100 rows, write them in the order of sample_id"),
        (np.repeat(KEPT, 2), "has sample 3 more than once"),
        (np.insert(KEPT, 64, KEPT[63]), f"has sample {KEPT[63]} more than once"),
    ):
        with pytest.raises(ConfigError, match=match):
            write_selection(on(pairs_dataset, write(ids)).data, pairs_dataset, tmp_path / "selection")


def test_a_pinned_file_stays_as_it_is(write):
    once = pinned(write(KEPT), "select")
    assert pinned(once, "select") == once
    assert pinned("", "select") == ""


# What the other commands say of such a run


def test_status_counts_the_selected_samples(selected):
    status = read_status(selected)
    assert (status.sample_state.samples, status.sample_state.dataset_samples) == (len(KEPT), 2_000)
    assert status.sample_state.coverage == pytest.approx(1, abs=0.05)
    assert (status.total_steps, status.state) == (status.steps.step, "finished")


# Weights


def weighted(dataset, weights, **more):
    data = {"path": str(dataset.path), "image_size": 16, "weights": weights}
    return small(dataset, **{"batch_size": 256, "data": data} | more)


def test_weights_that_are_all_equal_change_nothing(finished, pairs_dataset, write, tmp_path):
    run = train(weighted(pairs_dataset, write(np.arange(2_000), [0.3] * 2_000)), tmp_path / "run")
    assert_same_run(run, finished)


def test_a_step_has_its_samples_weights_relative_to_the_mean_of_the_selected_ones(pairs_dataset, write, tmp_path):
    weights = np.random.default_rng(0).random(2_000)
    mixed = np.random.default_rng(1).permutation(2_000)
    data = {
        "path": str(pairs_dataset.path), "image_size": 16, "select": write(KEPT),
        "weights": write(mixed, weights[mixed], "weights.parquet"),
    }  # fmt: skip
    run, seen = RunDirectory(tmp_path / "run"), []
    with Trainer.open(small(pairs_dataset, batch_size=64, epochs=1, data=data, micro_batch=16), run) as trainer:
        take = trainer.run.take

        def noted(sample_ids):
            state = take(sample_ids)
            seen.append((sample_ids.numpy().copy(), state["weight"].numpy()))
            return state

        trainer.run.take = noted
        trainer.train()
    for ids, of_ids in seen:
        np.testing.assert_allclose(of_ids, weights[ids] / weights[KEPT].mean(), rtol=1e-6)
    assert Selection(run.selection).weights.mean() == pytest.approx(1, abs=1e-6)
    assert np.isfinite(list(losses(run).values())).all()
    assert "image/tau" in StateReader.open(run.state).columns
    assert "weight" not in StateReader.open(run.state).columns


@pytest.mark.parametrize("rest", [0, [0.01, 1e-60, *[0] * 1_997]], ids=["zeros", "some that are 0 in float32"])
def test_weights_of_0_beside_a_large_one_are_taken_if_others_remain(pairs_dataset, write, tmp_path, rest):
    file = write(range(2_000), np.append(1e6, np.broadcast_to(rest, 1_999)))
    write_selection(weighted(pairs_dataset, file).data, pairs_dataset, tmp_path / "selection")
    assert Selection(tmp_path / "selection").weights[0] == pytest.approx(2_000)


@pytest.mark.parametrize(
    ("ids", "weights", "match"),
    [
        (range(1_999), [1.0] * 1_999, "has no weight for sample 1999; give every sample"),
        (range(2_000), [*[1.0] * 1_999, -1], "has weight -1 for sample 1999; it must be finite and ≥ 0"),
        (range(2_000), [*[1.0] * 1_999, np.nan], "has weight nan for sample 1999; it must"),
        (range(2_000), pa.array([None, *[1.0] * 1_999]), r"rows without a weight \(null\)"),
        (range(2_000), [0] * 2_000, "add up to 0; their mean must be positive"),
        (range(2_000), [5e-324, *[0] * 1_999], "their mean must be positive"),
        (
            range(2_000),
            [1e300, 1e300, *[1] * 1_998],
            r"the largest weight, 1e\+300, is so large .* all others become 0",
        ),
        (range(2_000), ["1"] * 2_000, "the column 'weight' is string; it must hold numbers"),
        ([*range(2_000), 9], [1] * 2_001, "has sample 9 more than once"),
    ],
)
def test_bad_weights_are_refused_in_one_line_and_leave_no_run(pairs_dataset, write, tmp_path, ids, weights, match):
    refuses(lambda: weighted(pairs_dataset, write(ids, weights)), match, tmp_path)


def test_weights_for_a_loss_that_is_no_mean_over_anchors_are_refused(pairs_dataset, write):
    with pytest.raises(ConfigError, match=r"data\.weights: objective 'siglip' takes no weights of samples; valid: "):
        weighted(pairs_dataset, write(range(2_000), [1] * 2_000), objective={"name": "siglip"})
    with pytest.raises(ConfigError, match="takes no weights of samples"):
        weighted(pairs_dataset, write(range(2_000), [1] * 2_000), objective={"name": "support.own_code:Weighted"})


def test_long_files_of_weights_are_read_in_pieces(pairs_dataset, write, tmp_path, monkeypatch):
    weights = np.random.default_rng(0).random(2_000)
    data = on(pairs_dataset, write(KEPT)).data
    data = data.model_copy(update={"weights": pinned(write(np.arange(2_000), weights, "weights.parquet"), "weights")})
    write_selection(data, pairs_dataset, tmp_path / "whole")
    monkeypatch.setattr("thermopile.trainer.run.selection_files.MAX_UNSORTED", 100)
    monkeypatch.setattr("thermopile.trainer.run.selection_files.ROWS_AT_ONCE", 64)
    write_selection(data, pairs_dataset, tmp_path / "pieces")
    whole, pieces = Selection(tmp_path / "whole"), Selection(tmp_path / "pieces")
    np.testing.assert_allclose(pieces.weights, whole.weights, rtol=1e-6)
    np.testing.assert_allclose(pieces.weights, weights[KEPT] / weights[KEPT].mean(), rtol=1e-6)
