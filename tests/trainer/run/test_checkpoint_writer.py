"""Checkpoints are written beside training: of the boundary at which they were cut, one after another."""

import logging
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from thermopile.state_store.errors import SnapshotError
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint
from thermopile.trainer.checkpoints.host_copy import CopyOnHost
from thermopile.trainer.config import load_config
from thermopile.trainer.loop import Trainer
from thermopile.trainer.metrics.metrics_log import MetricsLog
from thermopile.trainer.run import checkpoint_writer
from thermopile.trainer.run.checkpoint_writer import Checkpointer, WriteState
from thermopile.trainer.run_directory import RunDirectory
from thermopile.trainer.world import ALONE, World

from support import runs
from support.runs import checkpoints

PATIENCE = 20
"""Seconds after which a wait that should end has failed."""


def small(dataset, **checkpoint):
    return runs.small(dataset, epochs=1, checkpoint={"every_minutes": 0, "keep_last": 9} | checkpoint)


class SlowDisk:
    """Lets a checkpoint's model part be written only once `free` is set."""

    def __init__(self, monkeypatch):
        self.began, self.free = threading.Event(), threading.Event()
        self._save = checkpoint_writer.checkpoint_files.save_checkpoint
        monkeypatch.setattr(checkpoint_writer.checkpoint_files, "save_checkpoint", self)

    def __call__(self, *arguments, **named):
        self.began.set()
        assert self.free.wait(PATIENCE)
        return self._save(*arguments, **named)


@pytest.fixture
def slow_disk(monkeypatch):
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.free.set()


# A run's checkpoints


def test_a_checkpoint_written_beside_training_holds_the_weights_of_its_own_step(pairs_dataset, tmp_path, slow_disk):
    stopped, run = RunDirectory(tmp_path / "stopped"), RunDirectory(tmp_path / "run")

    def report(report):
        if report.step == 6:
            assert slow_disk.began.wait(PATIENCE)
            assert checkpoints(run) == set()
            slow_disk.free.set()

    with Trainer.open(small(pairs_dataset, every_steps=3), run) as trainer:
        trainer.train(report)
    assert checkpoints(run) == {3, 6, 7}
    with Trainer.open(small(pairs_dataset), stopped) as trainer:
        trainer.train(should_stop=lambda: trainer.run.steps_done == 3)
    (_, kept), (_, expected) = (load_checkpoint(each.checkpoints / "step-3") for each in (run, stopped))
    torch.testing.assert_close(kept["encoders"], expected["encoders"], rtol=0, atol=0)
    memory, expected_memory = (training["optimizer"]["weights"]["state"] for training in (kept, expected))
    assert memory
    torch.testing.assert_close(memory, expected_memory, rtol=0, atol=0)


def test_weights_are_copied_before_the_snapshot_is_begun_and_their_memory_is_in_use_until_then_if_it_fails(
    pairs_dataset, tmp_path, monkeypatch
):
    calls = []

    class Watched(CopyOnHost):
        def __init__(self, *given):
            calls.append("copied")
            super().__init__(*given)

        def result(self):
            calls.append("awaited")
            return super().result()

    def fail(*_, **__):
        calls.append("snapshot")
        raise SnapshotError("no room")

    with Trainer.open(small(pairs_dataset), RunDirectory(tmp_path / "run")) as trainer:
        monkeypatch.setattr(checkpoint_writer, "CopyOnHost", Watched)
        monkeypatch.setattr(trainer.run.store, "snapshot", fail)
        with pytest.raises(SnapshotError, match="no room"):
            trainer.run.checkpointer.save(3, 0, trainer.run.training_state, is_last=False)
    assert calls == ["copied", "snapshot", "awaited"]


def test_a_checkpoint_that_comes_due_while_one_is_written_waits_for_it(pairs_dataset, tmp_path, slow_disk):
    run, waited = RunDirectory(tmp_path / "run"), []
    with Trainer.open(small(pairs_dataset, every_steps=3), run) as trainer:

        def let_go_late():
            assert slow_disk.began.wait(PATIENCE)
            deadline = time.monotonic() + PATIENCE
            while trainer.run.steps_done < 6 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.3)
            waited.append(trainer.run.steps_done)
            slow_disk.free.set()

        thread = threading.Thread(target=let_go_late)
        thread.start()
        trainer.train()
        thread.join()
    assert waited == [6]
    assert checkpoints(run) == {3, 6, 7}


def test_a_run_that_ends_by_an_error_finishes_the_checkpoint_being_written(pairs_dataset, tmp_path, slow_disk):
    run = RunDirectory(tmp_path / "run")

    def report(report):
        if report.step == 4:
            assert slow_disk.began.wait(PATIENCE)
            threading.Timer(0.3, slow_disk.free.set).start()
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        Trainer.open(small(pairs_dataset, every_steps=3), run) as trainer,
    ):
        trainer.train(report)
    assert checkpoints(run) == {3}
    assert latest_checkpoint(run.checkpoints).name == "step-3"
    with Trainer.open(run.config(), run, resume=True) as trainer:
        assert trainer.run.steps_done == 3


@pytest.mark.parametrize("at", [3, 7])
def test_an_error_that_no_disk_gives_ends_the_run(pairs_dataset, tmp_path, monkeypatch, at):
    save = checkpoint_writer.checkpoint_files.save_checkpoint

    def wrong(folder, info, training, **named):
        if info.step == at:
            raise KeyError("a mistake in the program")
        return save(folder, info, training, **named)

    monkeypatch.setattr(checkpoint_writer.checkpoint_files, "save_checkpoint", wrong)
    run = RunDirectory(tmp_path / "run")
    with (
        pytest.raises(KeyError, match="a mistake in the program"),
        Trainer.open(small(pairs_dataset, every_steps=3), run) as trainer,
    ):
        trainer.train()
    assert checkpoints(run) == (set() if at == 3 else {3, 6})


# When one is due, and how it went


@pytest.fixture
def clock(monkeypatch):
    """Seconds on the checkpointer's clock, to be set."""
    clock = type("Clock", (), {"now": 1000.0})()
    monkeypatch.setattr(checkpoint_writer.time, "monotonic", lambda: clock.now)
    return clock


class Store:
    """Counts how often old snapshots are dropped: once for each checkpoint that was written."""

    def __init__(self):
        self.retained = 0

    def retain(self, keep_last, keep_every, keep_early):
        self.retained += 1
        return written()


@pytest.fixture
def make(request, tmp_path):
    def make(world=ALONE, **config):
        settings, log = load_config({"checkpoint": config}), MetricsLog(None, keep_steps=0)
        made = Checkpointer(settings, RunDirectory(tmp_path), Store(), log, world, "fingerprint")
        request.addfinalizer(made.close)
        return made

    return make


def written():
    """A snapshot that is committed."""
    snapshot = Future()
    snapshot.set_result(None)
    return snapshot


def failed(error):
    snapshot = Future()
    snapshot.set_exception(error)
    return snapshot


def ended(checkpoint_writer, snapshot, step=1):
    """The checkpointer of a rank that writes no model part, at the end of a checkpoint."""
    checkpoint_writer.begin(step, snapshot, None)
    assert checkpoint_writer.wait()
    return checkpoint_writer


def test_one_is_due_after_so_many_steps_or_so_many_minutes_since_the_last_one_began(make, clock):
    by_steps, by_time = make(every_steps=5, every_minutes=0), make(every_minutes=2)
    assert [step for step in range(1, 16) if by_steps.is_due(step)] == [5, 10, 15]
    clock.now += 119
    assert not by_time.is_due(7)
    clock.now += 1
    assert by_time.is_due(8)
    ended(by_time, written()).settle([WriteState.WRITTEN])
    assert not by_time.is_due(9)
    assert not any(make(every_minutes=0).is_due(step) for step in range(1, 100))


def test_several_that_failed_in_a_row_are_warned_of_once_and_due_again_a_minute_later_and_not_before(
    make, clock, caplog
):
    made = ended(make(every_steps=1), failed(OSError("disk full")), step=3)
    assert made.write_state == WriteState.FAILED
    made.settle([WriteState.FAILED])
    ended(made, failed(OSError("disk full")), step=4).settle([WriteState.FAILED])
    assert len(caplog.records) == 1
    assert "the checkpoint of step 3 was not written: disk full. It is tried again every 60 seconds" in caplog.text
    clock.now += checkpoint_writer.RETRY_SECONDS - 1
    assert not made.is_due(4)
    clock.now += 1
    assert made.is_due(5)
    assert made._store.retained == 0
    ended(made, written(), step=5).settle([WriteState.WRITTEN])
    assert made.write_state == WriteState.NONE
    assert made._store.retained == 1
    ended(made, failed(OSError("disk full")), step=6).settle([WriteState.FAILED])
    assert "the checkpoint of step 6 was not written" in caplog.text


def test_where_it_must_succeed_its_error_is_raised(make):
    with pytest.raises(OSError, match="disk full"):
        ended(make(), failed(OSError("disk full"))).settle([WriteState.FAILED], must_succeed=True)


def test_an_unexpected_error_is_raised_in_any_case(make):
    with pytest.raises(ZeroDivisionError):
        ended(make(), failed(ZeroDivisionError())).settle([WriteState.FAILED])


def test_it_is_settled_only_once_every_rank_is_done_and_only_the_first_one_warns(make, caplog):
    own = ended(make(World(rank=1, size=2)), written())
    own.settle([WriteState.WRITING, WriteState.WRITTEN])
    assert own.write_state == WriteState.WRITTEN
    own.settle([WriteState.FAILED, WriteState.WRITTEN])
    assert own.write_state == WriteState.NONE
    assert own._store.retained == 0
    assert not caplog.records
    last = ended(make(World(rank=0, size=2)), written())
    with caplog.at_level(logging.WARNING), pytest.raises(SnapshotError, match="rank 1 could not write its part"):
        last.settle([WriteState.WRITTEN, WriteState.FAILED], must_succeed=True)


def test_without_one_there_is_nothing_to_wait_for(make):
    none = make()
    assert not none.wait()
    none.finish(must_succeed=True)
    none.settle([WriteState.NONE])
    assert none._store.retained == 0
