"""Checkpoints that are dropped, and checkpoints that cannot be written."""

import shutil

import pytest

from thermopile.state_store.durable import list_snapshots
from thermopile.state_store.errors import SnapshotError
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run import checkpoint_writer
from thermopile.trainer.run_directory import RunDirectory

from support.runs import assert_same_run, checkpoints, small, snapshots, stop_at, train


def snapshot_of_the_latest(run):
    info, _ = load_checkpoint(latest_checkpoint(run.checkpoints))
    return info.snapshot


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        pytest.param({"keep_last": 1}, {14}, marks=pytest.mark.wide),
        ({"keep_last": 1, "keep_every": 6}, {6, 12, 14}),
        pytest.param({"keep_last": 9}, {3, 6, 9, 12, 14}, marks=pytest.mark.wide),
    ],
)
def test_the_snapshots_kept_are_those_of_the_checkpoints_and_a_few_early_ones(pairs_dataset, tmp_path, keep, kept):
    config, run = small(pairs_dataset, checkpoint={"every_steps": 3, **keep}), RunDirectory(tmp_path / "run")

    def latest_is_whole(report):
        if report.step > 3:
            trainer.run.checkpointer.finish()
            assert snapshot_of_the_latest(run) in {snapshot.id for snapshot in list_snapshots(run.state)}

    with Trainer.open(config, run) as trainer:
        trainer.train(latest_is_whole)
    assert checkpoints(run) == kept
    assert snapshots(run) == kept | {0, 3, 6, 12}  # the early ones from 2.2, 4.6 and 10 steps on


def test_checkpoints_that_a_run_went_back_behind_do_not_crowd_out_the_new_one(pairs_dataset, tmp_path):
    config, run = small(pairs_dataset, checkpoint={"every_steps": 3, "keep_last": 9}), RunDirectory(tmp_path / "run")
    with Trainer.open(config, run) as trainer:
        trainer.train()
    for step in (9, 12, 14):
        shutil.rmtree(run.checkpoints / f"step-{step}")
    config = small(pairs_dataset, checkpoint={"every_steps": 3, "keep_last": 1})

    def stop(report):
        trainer.run.checkpointer.finish()
        stop_at(11)(report)

    with pytest.raises(KeyboardInterrupt), Trainer.open(config, run, resume=True) as trainer:
        trainer.train(stop)
    assert latest_checkpoint(run.checkpoints).name == "step-9"
    assert checkpoints(run) == {9}
    assert snapshots(run) == {0, 3, 6, 9}


def test_a_damaged_snapshot_that_is_kept_is_told_of_until_a_resume_forgets_it(pairs_dataset, tmp_path, caplog):
    keep = {"every_steps": 3, "keep_last": 1, "keep_every": 6}
    config, run = small(pairs_dataset, checkpoint=keep), RunDirectory(tmp_path / "run")

    def damage(report):
        trainer.run.checkpointer.finish()
        if report.step == 10:
            info, _ = load_checkpoint(run.checkpoints / "step-6")
            (run.state / "snapshots" / info.snapshot).unlink()
        stop_at(13)(report)

    with pytest.raises(KeyboardInterrupt), Trainer.open(config, run) as trainer:
        trainer.train(damage)
    assert caplog.messages
    for warning in caplog.messages:
        assert "not all old snapshots were deleted" in warning
        assert "restore the file from a copy" in warning
    assert snapshots(run) == {0, 3, 9, 12}
    caplog.clear()
    with Trainer.open(config, run, resume=True) as trainer:
        trainer.train()
    [warning] = [record.getMessage() for record in caplog.records]
    assert "snapshot step-6 is damaged" in warning
    assert checkpoints(run) == {6, 12, 14}
    assert snapshots(run) == {0, 3, 9, 12, 14}


@pytest.mark.wide
@pytest.mark.parametrize(
    "rows",
    [{}, {"order": {"canonical_shards": 2}, "state": {"memory_budget": "40KB"}}],
)
def test_a_newest_snapshot_damaged_meanwhile_is_named_once_and_changes_nothing(pairs_dataset, tmp_path, caplog, rows):
    config = small(pairs_dataset, batch_size=128, checkpoint={"every_steps": 3, "keep_last": 2}, **rows)
    run, whole = RunDirectory(tmp_path / "run"), train(config, tmp_path / "whole")

    def damage(report):
        trainer.run.checkpointer.finish()
        if report.step == 10:
            trainer.run.store.flush()
            (run.state / "snapshots" / snapshot_of_the_latest(run)).unlink()

    with Trainer.open(config, run) as trainer:
        trainer.train(damage)
    assert_same_run(run, whole)
    assert snapshots(run) == snapshots(whole)
    assert checkpoints(run) == checkpoints(whole)
    [warning] = caplog.messages
    assert "snapshot step-9 is damaged" in warning


def block(run):
    """Let no snapshot be written: it finds a file where its chunks belong."""
    (run.state / "chunks").mkdir(exist_ok=True)
    (run.state / "chunks").rename(run.state / "chunks-away")
    (run.state / "chunks").touch()


def unblock(run):
    (run.state / "chunks").unlink()
    (run.state / "chunks-away").rename(run.state / "chunks")


def test_a_snapshot_that_fails_is_tried_again_and_training_goes_on(
    finished, pairs_dataset, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 0.0)
    config, run = small(pairs_dataset, checkpoint={"every_steps": 3, "keep_last": 9}), RunDirectory(tmp_path / "run")

    def report(report):
        if report.step in (6, 7, 9):
            trainer.run.checkpointer.finish()
        if report.step == 6:
            block(run)
        if report.step == 9:
            assert latest_checkpoint(run.checkpoints).name == "step-3"
            unblock(run)

    with Trainer.open(config, run) as trainer:
        trainer.train(report)
    warned = [message for message in caplog.messages if message.startswith("the checkpoint of step")]
    assert [message.split(" was")[0] for message in warned] == ["the checkpoint of step 6"]
    assert checkpoints(run) == {3, 9, 12, 14}
    assert_same_run(run, finished)


def test_a_failed_attempt_is_not_repeated_at_every_step(pairs_dataset, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 1e9)
    config, run = small(pairs_dataset, epochs=1, checkpoint={"every_steps": 2}), RunDirectory(tmp_path / "run")

    def report(report):
        if report.step == 2:
            block(run)
        if report.step == 3:
            trainer.run.checkpointer.finish()
        if report.step == 6:
            unblock(run)

    with Trainer.open(config, run) as trainer:
        trainer.train(report)
    assert [record.name for record in caplog.records].count(checkpoint_writer.__name__) == 1
    assert checkpoints(run) == {7}


def test_a_run_fails_whose_last_checkpoint_cannot_be_written_and_can_be_resumed(
    finished, pairs_dataset, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 0.0)
    config, run = small(pairs_dataset, checkpoint={"every_steps": 5}), RunDirectory(tmp_path / "run")

    def report(report):
        if report.step == 14:
            trainer.run.checkpointer.finish()
            block(run)

    with pytest.raises(SnapshotError, match="snapshot of step 14"), Trainer.open(config, run) as trainer:
        trainer.train(report)
    unblock(run)
    with Trainer.open(config, run, resume=True) as trainer:
        assert trainer.run.steps_done == 10
        trainer.train()
    assert_same_run(run, finished)


def test_a_model_part_that_fails_leaves_the_last_checkpoint_with_its_snapshot(
    pairs_dataset, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 0.0)
    config, run = small(pairs_dataset, checkpoint={"every_steps": 3, "keep_last": 2}), RunDirectory(tmp_path / "run")

    def report(report):
        if report.step in (6, 7):
            trainer.run.checkpointer.finish()
        if report.step == 6:
            (run.checkpoints / ".step-6.partial").touch()  # a file where its directory belongs
        if report.step == 7:
            assert latest_checkpoint(run.checkpoints).name == "step-3"
            assert snapshot_of_the_latest(run) in {snapshot.id for snapshot in list_snapshots(run.state)}

    with Trainer.open(config, run) as trainer:
        trainer.train(report)
    assert "the checkpoint of step 6 was not written" in caplog.text
    assert checkpoints(run) == {12, 14}
    assert snapshots(run) == {0, 3, 6, 12, 14}
