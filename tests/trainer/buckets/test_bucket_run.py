"""A run in a bucket trains as one on a disk does and survives what a network does."""

import os
import random
import threading
import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from thermopile.state_store.durable import list_snapshots
from thermopile.state_store.errors import SnapshotError, StoreLockedError
from thermopile.state_store.reader import StateReader
from thermopile.storage import bucket_lock
from thermopile.storage.bucket import SCRATCH, Address
from thermopile.storage.bucket_errors import ObjectStoreError
from thermopile.trainer.checkpoints import checkpoint_files
from thermopile.trainer.checkpoints.checkpoint_files import (
    checkpoints_in,
    latest_checkpoint,
    load_checkpoint,
    remove_checkpoints,
)
from thermopile.trainer.errors import RunExistsError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run import checkpoint_writer

from support.cli import sets
from support.runs import OFTEN, SMALL, assert_same_run, finish, losses, new_run, small, stopped, train

pytestmark = pytest.mark.wide


def test_losses_weights_and_state_are_those_of_a_run_on_a_disk(pairs_dataset, run, whole):
    train(small(pairs_dataset, **OFTEN), run)
    assert_same_run(run, whole)
    assert [snapshot.step for snapshot in list_snapshots(run.state)] == [0, 2, 4, 6, 10, 12, 14]


def test_a_run_is_resumed_on_another_machine_with_its_metrics(pairs_dataset, run, whole, elsewhere):
    config = small(pairs_dataset, **OFTEN)
    run = elsewhere(stopped(config, run, 9))
    train(config, run, resume=True)
    assert_same_run(run, whole)
    assert sorted(losses(run)) == list(range(1, 15))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_a_run_that_is_killed_at_any_moment_leaves_a_snapshot_and_goes_on_from_it(
    pairs_dataset, run, whole, start_program, kills
):
    settings = sets("checkpoint.every_steps=1", *SMALL)
    arguments = ["train", "--out", run.path, "--data", pairs_dataset.path, "--resume", *settings]
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", SCRATCH))}
    moments, kept = random.Random(3), 0
    for _ in range(kills):
        program = start_program(*arguments, **variables)
        deadline, before = time.monotonic() + 100, kept
        while program.is_running() and time.monotonic() < deadline and not _has_snapshot_after(run, before):
            time.sleep(0.05)
        time.sleep(moments.uniform(0, 0.7))
        program.kill()
        program.end()
        snapshots = [snapshot.step for snapshot in list_snapshots(run.state)]
        assert snapshots[-1] >= kept
        for step in snapshots:
            one, other = StateReader.open(run.state, f"step-{step}"), StateReader.open(whole.state, f"step-{step}")
            for column in one.columns:
                np.testing.assert_array_equal(one.column(column), other.column(column))
        # A checkpoint that is there is whole, and its snapshot is there.
        for path in checkpoints_in(run.checkpoints).values():
            assert load_checkpoint(path)[0].snapshot in {snapshot.id for snapshot in list_snapshots(run.state)}
        kept = max([0, *checkpoints_in(run.checkpoints)])
        if kept == 14:  # done, before it was killed: once more, from the start
            run = new_run()
            arguments[2], kept = run.path, 0
    finish([start_program(*arguments, **variables)])
    assert_same_run(run, whole)


def _has_snapshot_after(run, step):
    return run.has_state and list_snapshots(run.state)[-1].step > step


def test_a_store_that_fails_in_every_twentieth_request_changes_nothing(pairs_dataset, run, whole, s3):
    with s3.gateway(failing=0.05) as gateway:
        train(small(pairs_dataset, **OFTEN), run)
        assert gateway.stats()["failed"] > 5
    assert_same_run(run, whole)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.soak)])
def test_a_store_that_is_away_for_a_while_ends_no_run(pairs_dataset, run, whole, s3, seconds):
    with s3.gateway() as gateway:

        def away(report):
            if report.step == 5:
                gateway.stop()
                threading.Timer(seconds, gateway.start).start()

        train(small(pairs_dataset, **OFTEN), run, on_report=away)
    assert_same_run(run, whole)


def test_training_goes_on_while_checkpoints_fail(pairs_dataset, run, whole, s3, impatient, caplog):
    steps = []

    def away(report):
        steps.append(report.step)
        if report.step == 5:
            gateway.stop()
        if report.step == 12:
            gateway.start()

    with s3.gateway() as gateway:
        train(small(pairs_dataset, **OFTEN), run, on_report=away)
    assert caplog.text.count("It is tried again every") == 1  # said once, however many fail
    assert steps == list(range(1, 15))
    assert_same_run(run, whole)


def test_a_store_that_stays_away_at_the_end_is_one_error_and_leaves_a_run_to_resume(
    pairs_dataset, run, whole, s3, impatient
):
    config = small(pairs_dataset, **OFTEN)

    def away(report):
        if report.step == 12:
            trainer.run.checkpointer.wait()
            gateway.stop()

    with (
        s3.gateway() as gateway,
        Trainer.open(config, run) as trainer,
        pytest.raises(SnapshotError, match=r"^[^\n]*step 14[^\n]*was not written[^\n]*$"),
    ):
        trainer.train(on_report=away)
    assert max(checkpoints_in(run.checkpoints)) == 10
    train(config, run, resume=True)
    assert_same_run(run, whole)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_the_last_checkpoint_waits_for_a_store_that_comes_back(
    pairs_dataset, run, whole, s3, seconds, request, monkeypatch
):
    if seconds < 60:
        request.getfixturevalue("impatient")
        monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 2.0)

    def away(report):
        if report.step == 14:
            trainer.run.checkpointer.wait()
            gateway.stop()
            threading.Timer(seconds, gateway.start).start()

    with s3.gateway() as gateway, Trainer.open(small(pairs_dataset, **OFTEN), run) as trainer:
        trainer.train(on_report=away)
    assert_same_run(run, whole)


def test_a_second_run_at_the_same_address_is_refused(pairs_dataset, run, elsewhere, monkeypatch):
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.2)
    config = small(pairs_dataset, **OFTEN)
    with Trainer.open(config, run):
        with pytest.raises(RunExistsError, match="holds a run"):
            Trainer.open(config, run)
        for place in (run, elsewhere(run)):
            with pytest.raises(StoreLockedError, match=f"is being written by pid {os.getpid()} "):
                Trainer.open(config, place, resume=True)


def test_a_run_that_was_taken_for_dead_ends_at_its_next_checkpoint_and_harms_nothing(
    pairs_dataset, run, whole, elsewhere, monkeypatch
):
    config = small(pairs_dataset, **OFTEN)
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 1e6)  # it sleeps
    monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 0.5)
    with Trainer.open(config, run) as first:
        second = None

        def take_over(report):
            nonlocal second
            if report.step == 5:
                first.run.checkpointer.wait()
                monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.2)
                monkeypatch.setattr(bucket_lock, "SILENT_SECONDS", 1.0)
                second = Trainer.open(config, elsewhere(run), resume=True)

        with pytest.raises(StoreLockedError, match="another process has begun to write this state"):
            first.train(on_report=take_over)
        with second:
            assert second.run.steps_done == 4
            second.train()
    assert_same_run(second.run.directory, whole)


def test_a_run_that_was_replaced_while_it_uploaded_a_checkpoint_announces_nothing(
    pairs_dataset, run, whole, elsewhere, monkeypatch
):
    config, write, second = small(pairs_dataset, **OFTEN), Address.write, []
    monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 1e6)  # it sleeps
    monkeypatch.setattr(bucket_lock, "LEASE_SECONDS", 0.5)

    def replaced(address, data):
        write(address, data)
        if address.parent.name.startswith("step-4.") and not second:
            monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.2)
            monkeypatch.setattr(bucket_lock, "SILENT_SECONDS", 1.0)
            second.append(elsewhere(run))
            with Trainer.open(config, second[0], resume=True) as trainer:
                assert trainer.run.steps_done == 2
                trainer.train()

    monkeypatch.setattr(Address, "write", replaced)
    with (
        pytest.raises(StoreLockedError, match="another process has begun to write this state"),
        Trainer.open(config, run) as first,
    ):
        first.train()
    assert sorted(checkpoints_in(run.checkpoints)) == [12, 14]
    assert latest_checkpoint(run.checkpoints).name == "step-14.00000002"
    assert_same_run(second[0], whole)


def test_the_last_checkpoint_is_tried_again_after_its_snapshot_was_committed(
    pairs_dataset, run, whole, impatient, monkeypatch
):
    write, failures = Address.write, iter([ObjectStoreError("away")])

    def failing_once(address, data):
        if address.parent.name.startswith("step-14."):
            for failure in failures:
                raise failure
        write(address, data)

    monkeypatch.setattr(Address, "write", failing_once)
    train(small(pairs_dataset, **OFTEN), run)
    assert max(checkpoints_in(run.checkpoints)) == 14
    assert_same_run(run, whole)


def test_what_killed_ranks_left_is_removed_at_the_next_start(pairs_dataset, run):
    config = small(pairs_dataset, **OFTEN)
    with Trainer.open(config, run) as trainer:
        trainer.train(should_stop=lambda: trainer.run.steps_done >= 2)
    (run.path / ".ranks" / "1.partial").write(b"")
    train(config, run, resume=True)
    assert not any(name.startswith(".ranks/") for name, _, _ in run.path.listing())


def test_objects_are_bounded_however_many_checkpoints_were_made(pairs_dataset, run, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "KEEP_EARLY", 0)  # they would grow like the logarithm of the steps
    every = {"checkpoint": {"every_steps": 1, "every_minutes": 0, "keep_last": 2}}
    counts = []

    def look(report):
        trainer.run.checkpointer.wait()
        if report.step > 3:
            counts.append(sum(1 for name, _, _ in run.path.listing() if not name.startswith("metrics/")))

    with Trainer.open(small(pairs_dataset, epochs=3, **every), run) as trainer:
        trainer.train(on_report=look)
    assert len(counts) == 18
    assert max(counts[9:]) <= max(counts[:9])
    assert len(list((run.path / "metrics").listing())) <= 6


@pytest.mark.parametrize(
    "left", ["nothing", pytest.param("tensors.safetensors", marks=pytest.mark.soak), "training.json"]
)
def test_a_checkpoint_without_its_seal_is_none_and_is_cleared_away(pairs_dataset, run, left):
    train(small(pairs_dataset, **OFTEN), run)
    folder = run.checkpoints / "step-14.00000001"
    for name in ("checkpoint.json", "training.json", "tensors.safetensors"):
        if name == left:
            break
        (folder / name).delete()
    assert sorted(checkpoints_in(run.checkpoints)) == [12]
    assert latest_checkpoint(run.checkpoints) == run.checkpoints / "step-12.00000001"
    before = list(folder.listing())
    remove_checkpoints(run.checkpoints, keep={12})
    assert list(folder.listing()) == before  # another writer may be about to seal it
    remove_checkpoints(run.checkpoints, keep={12, 16})
    assert list(folder.listing()) == []


@pytest.mark.parametrize(
    "objects_written", [0, 2, pytest.param(1, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)]
)
def test_a_checkpoint_whose_writing_or_removal_was_interrupted_never_looks_whole(
    pairs_dataset, run, objects_written, monkeypatch
):
    config = small(pairs_dataset, **OFTEN)
    train(config, run)
    info, training = load_checkpoint(latest_checkpoint(run.checkpoints))
    again = info.model_copy(update={"order_version": 99})
    writes, held = (
        count(),
        replace(run.checkpoints, lease=SimpleNamespace(term="00000002", confirm=lambda seconds: None)),
    )

    def interrupted(wrote):
        def write(address, data):
            if next(writes) == objects_written:
                raise OSError("interrupted")
            wrote(address, data)

        return write

    for verb in ("write", "rewrite"):
        monkeypatch.setattr(Address, verb, interrupted(getattr(Address, verb)))
    with pytest.raises(OSError, match="interrupted"):
        checkpoint_files.save_checkpoint(held, again, training)
    found = checkpoints_in(run.checkpoints)
    assert sorted(found) == [12, 14]
    versions = [load_checkpoint(path)[0].order_version for _, path in sorted(found.items())]
    assert versions == [info.order_version, 99 if objects_written == 3 else info.order_version]
