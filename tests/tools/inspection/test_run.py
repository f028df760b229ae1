import shutil

import pytest

from thermopile.pipeline.errors import DatasetError
from thermopile.state_store.errors import SnapshotNotFoundError, StoreNotFoundError
from thermopile.tools.inspection.opening import read_run
from thermopile.trainer.errors import RunError
from thermopile.trainer.run_directory import RunDirectory

from support.written_checkpoints import write_checkpoint
from support.written_runs import write_run


def test_a_run_is_read_with_its_settings_its_last_snapshot_and_its_dataset(hostile_run, hostile_dataset):
    inspection = read_run(hostile_run)
    assert inspection.config.objective.name == "isogclr"
    assert inspection.dataset.path == hostile_dataset.path
    assert (inspection.reader.snapshot.tag, inspection.reader.samples) == ("step-5", 66)
    assert inspection.sides == ("image", "text")
    assert [inspection.settings[name] for name in ("tau_init", "tau_min", "tau_max")] == [0.05, 0.005, 1.0]
    assert inspection.notes == []


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="is not a run"):
        read_run(RunDirectory(tmp_path))


def test_a_run_killed_before_its_first_snapshot_is_noted(hostile_dataset, tmp_path):
    inspection = read_run(write_run(tmp_path / "run", hostile_dataset, {}, snapshot=False))
    assert inspection.reader is None
    assert "no snapshot of its state yet" in inspection.notes[0]


def test_a_snapshot_asked_for_by_name_must_be_there(hostile_dataset, hostile_run, tmp_path):
    with pytest.raises(SnapshotNotFoundError, match="no snapshot 'step-99'; available: step-0, step-5, latest"):
        read_run(hostile_run, at="step-99")
    with pytest.raises(StoreNotFoundError):
        read_run(write_run(tmp_path / "run", hostile_dataset, {}, snapshot=False), at="step-5")


def test_an_objective_without_temperatures_is_noted(hostile_dataset, tmp_path):
    inspection = read_run(write_run(tmp_path / "run", hostile_dataset, {}, objective="clip"))
    assert inspection.sides == ()
    assert "clip has no temperature per sample" in inspection.notes[0]


@pytest.fixture
def moved(hostile_dataset, tau_by_class_size, tmp_path):
    """A run whose dataset was moved after training, and where it is now."""
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(hostile_dataset.path, here)
    dataset = type(hostile_dataset)(here)
    run = write_run(tmp_path / "run", dataset, {"image": tau_by_class_size, "text": tau_by_class_size})
    here.rename(there)
    return run, there


def test_a_dataset_that_was_moved_is_noted_with_the_cure(moved):
    run, there = moved
    inspection = read_run(run)
    assert inspection.dataset is None
    assert inspection.reader.samples == 66
    assert "no classes and no pictures" in inspection.notes[0]
    assert "--data" in inspection.notes[0]
    assert read_run(run, data=there).dataset.path == there


def test_another_dataset_in_the_place_of_the_run_s_own_is_noted(moved, flat_dataset):
    run, there = moved
    shutil.copytree(flat_dataset.path, there.with_name("here"))
    inspection = read_run(run)
    assert inspection.dataset is None
    assert "is not the dataset that the run was trained on" in inspection.notes[0]


def test_another_dataset_given_by_hand_is_refused(hostile_run, flat_dataset):
    with pytest.raises(DatasetError, match="is not the dataset that the run was trained on"):
        read_run(hostile_run, data=flat_dataset.path)


def test_the_state_of_another_run_is_refused(hostile_run, tmp_path):
    run = RunDirectory(shutil.copytree(hostile_run.path, tmp_path / "run"))
    write_checkpoint(run, 5, "0123456789AB")
    with pytest.raises(RunError, match=r"is not this run's state: step-5 .* 0123456789AB"):
        read_run(run)


def test_a_state_that_is_gone_is_not_taken_for_a_run_before_its_first_checkpoint(hostile_run, tmp_path):
    run = RunDirectory(shutil.copytree(hostile_run.path, tmp_path / "run"))
    write_checkpoint(run, 5, "0123456789AB")
    shutil.rmtree(tmp_path / "run" / "state")
    with pytest.raises(RunError, match=r"step-5 belongs to the snapshot 0123456789AB, which is missing\. Restore"):
        read_run(run)


def test_the_state_that_the_checkpoint_names_is_the_run_s_own(hostile_run, tmp_path):
    run = RunDirectory(shutil.copytree(hostile_run.path, tmp_path / "run"))
    write_checkpoint(run, 5, read_run(hostile_run).reader.snapshot.id)
    assert read_run(run).reader.snapshot.tag == "step-5"
