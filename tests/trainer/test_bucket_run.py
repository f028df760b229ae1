"""A run in a bucket trains as one on a disk does, survives what a network does, and is read from anywhere."""

import os
import random
import threading
import time
from itertools import count

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile import objects, open_run
from thermopile.objects import Address
from thermopile.places import SCRATCH
from thermopile.state_store import SnapshotError, StateReader, StoreLockedError, bucket_lock, list_snapshots
from thermopile.trainer import checkpoint, checkpointer, run_status
from thermopile.trainer.build import resolve
from thermopile.trainer.checkpoint import checkpoints_in, latest_checkpoint, load_checkpoint, remove_checkpoints
from thermopile.trainer.config import load_config, to_tree
from thermopile.trainer.errors import RunExistsError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory
from thermopile.trainer.run_status import read_status

from small_runs import assert_same_state, assert_same_weights, losses, small, stop_at

pytestmark = pytest.mark.wide

OFTEN = {"checkpoint": {"every_steps": 2, "every_minutes": 0}}
_runs = count()


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def run(s3):
    return RunDirectory(Address("bucket", f"runs/{next(_runs)}"))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Return a function that gives the run as another machine sees it."""

    def move(run, machine="elsewhere"):
        monkeypatch.setenv(SCRATCH, str(tmp_path / machine))
        return RunDirectory(run.path)

    return move


@pytest.fixture(scope="module")
def whole(pairs_dataset, tmp_path_factory):
    """The same run on a disk, with a snapshot of every step."""
    changes = {"checkpoint": {"every_steps": 1, "every_minutes": 0, "keep_every": 1}}
    run = RunDirectory(tmp_path_factory.mktemp("whole") / "run")
    train(small(pairs_dataset, **changes), run)
    return run


def train(config, run, *, resume=False, **options):
    with Trainer.open(config, run, resume=resume) as trainer:
        trainer.run(**options)


def assert_same_run(run, whole):
    assert losses(run) == losses(whole)
    assert_same_weights(run, whole)
    assert_same_state(run, whole)


def test_losses_weights_and_state_are_those_of_a_run_on_a_disk(pairs_dataset, run, whole):
    train(small(pairs_dataset, **OFTEN), run)
    assert_same_run(run, whole)
    assert [snapshot.tag for snapshot in list_snapshots(run.state)] == ["step-0", "step-12", "step-14"]


def test_a_run_is_resumed_on_another_machine_with_its_metrics(pairs_dataset, run, whole, elsewhere):
    config = small(pairs_dataset, **OFTEN)
    with pytest.raises(KeyboardInterrupt):
        train(config, run, on_report=stop_at(9))
    run = elsewhere(run)
    train(config, run, resume=True)
    assert_same_run(run, whole)
    assert sorted(losses(run)) == list(range(1, 15))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_a_run_that_is_killed_at_any_moment_leaves_a_snapshot_and_goes_on_from_it(
    pairs_dataset, run, whole, start_program, kills
):
    settings = ["checkpoint.every_steps=1", "batch_size=256", "epochs=2", "log_every=1", "data.image_size=16",
                "model.dim=16", "model.image.config.width=8"]  # fmt: skip
    arguments = ["train", "--out", run.path, "--data", pairs_dataset.path, "--resume"]
    for each in settings:
        arguments += ["--set", each]
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
            run = RunDirectory(Address("bucket", f"runs/{next(_runs)}"))
            arguments[2], kept = run.path, 0
    code, _, errors = start_program(*arguments, **variables).end()
    assert code == 0, errors
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
    assert "the checkpoint of step 6 was not written" in caplog.text
    assert steps == list(range(1, 15))
    assert_same_run(run, whole)


def test_a_store_that_stays_away_at_the_end_is_one_error_and_leaves_a_run_to_resume(
    pairs_dataset, run, whole, s3, impatient
):
    config = small(pairs_dataset, **OFTEN)

    def away(report):
        if report.step == 12:
            trainer.checkpointer.wait()
            gateway.stop()

    with (
        s3.gateway() as gateway,
        Trainer.open(config, run) as trainer,
        pytest.raises(SnapshotError, match=r"^[^\n]*step 14[^\n]*was not written[^\n]*$"),
    ):
        trainer.run(on_report=away)
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
        monkeypatch.setattr(checkpointer, "RETRY_SECONDS", 2.0)

    def away(report):
        if report.step == 14:
            trainer.checkpointer.wait()
            gateway.stop()
            threading.Timer(seconds, gateway.start).start()

    with s3.gateway() as gateway, Trainer.open(small(pairs_dataset, **OFTEN), run) as trainer:
        trainer.run(on_report=away)
    assert_same_run(run, whole)


@pytest.fixture
def impatient(monkeypatch):
    import icechunk

    monkeypatch.setattr(objects, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(checkpointer, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr("thermopile.state_store.icechunk_files._REPEATS", icechunk.StorageRetriesSettings(max_tries=1))


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
    with Trainer.open(config, run) as first:
        second = None

        def take_over(report):
            nonlocal second
            if report.step == 5:
                first.checkpointer.wait()
                monkeypatch.setattr(bucket_lock, "BEAT_SECONDS", 0.2)
                monkeypatch.setattr(bucket_lock, "SILENT_SECONDS", 1.0)
                second = Trainer.open(config, elsewhere(run), resume=True)

        with pytest.raises(StoreLockedError, match="another process has begun to write this state"):
            first.run(on_report=take_over)
        with second:
            assert second.steps_done == 4
            second.run()
    assert_same_run(second.run_directory, whole)


def test_objects_are_bounded_however_many_checkpoints_were_made(pairs_dataset, run):
    every = {"checkpoint": {"every_steps": 1, "every_minutes": 0, "keep_last": 2}}
    counts = []

    def look(report):
        trainer.checkpointer.wait()
        if report.step > 3:
            counts.append(sum(1 for name, _ in run.path.objects() if not name.startswith("metrics/")))

    with Trainer.open(small(pairs_dataset, epochs=3, **every), run) as trainer:
        trainer.run(on_report=look)
    assert len(counts) == 18
    assert max(counts[9:]) <= max(counts[:9])
    assert len(list((run.path / "metrics").objects())) <= 6


@pytest.mark.parametrize("left", ["nothing", "tensors.safetensors", "training.json"])
def test_a_checkpoint_without_its_seal_is_none_and_is_cleared_away(pairs_dataset, run, left):
    train(small(pairs_dataset, **OFTEN), run)
    folder = run.checkpoints / "step-14"
    for name in ("checkpoint.json", "training.json", "tensors.safetensors"):
        if name == left:
            break
        (folder / name).delete()
    assert sorted(checkpoints_in(run.checkpoints)) == [12]
    assert latest_checkpoint(run.checkpoints) == run.checkpoints / "step-12"
    remove_checkpoints(run.checkpoints, keep={12})
    assert list(folder.objects()) == []


@pytest.mark.parametrize("objects_written", range(4))
def test_a_checkpoint_whose_writing_or_removal_was_interrupted_never_looks_whole(
    pairs_dataset, run, objects_written, monkeypatch
):
    config = small(pairs_dataset, **OFTEN)
    train(config, run)
    info, training = load_checkpoint(latest_checkpoint(run.checkpoints))
    again = info.model_copy(update={"order_version": 99})
    writes = count()

    def write(address, data):
        if next(writes) == objects_written:
            raise OSError("interrupted")
        wrote(address, data)

    wrote = Address.write
    monkeypatch.setattr(Address, "write", write)
    with pytest.raises(OSError, match="interrupted"):
        checkpoint.save_checkpoint(run.checkpoints, again, training)
    found = checkpoints_in(run.checkpoints)
    assert sorted(found) == ([12, 14] if objects_written == 3 else [12])
    for path in found.values():
        load_checkpoint(path)


def test_status_is_read_from_another_machine_with_the_age_of_the_last_part(pairs_dataset, run, elsewhere, monkeypatch):
    config = small(pairs_dataset, **OFTEN)
    seen = []

    def look(report):
        if report.step == 9:
            trainer.checkpointer.wait()
            seen.append(read_status(elsewhere(run)))

    with Trainer.open(config, run) as trainer:
        trainer.run(on_report=look)
    (status,) = seen
    assert status.state == "running"
    assert status.writer.startswith(f"pid {os.getpid()} on ")
    assert status.steps.step in (8, 9)
    assert 0 <= status.steps.age_seconds < 100
    assert [each.step for each in status.checkpoints] == [6, 8]
    assert all(each.bytes > 100_000 for each in status.checkpoints)
    assert status.notes == []
    done = read_status(run)
    assert (done.state, done.writer, done.steps.step, len(done.steps.loss_curve)) == ("finished", None, 14, 14)
    monkeypatch.setattr(run_status.time, "time", lambda now=time.time: now() + 500)
    assert read_status(run).steps.age_seconds >= 500


def test_open_run_reads_a_run_at_its_address(pairs_dataset, run, whole, elsewhere):
    train(small(pairs_dataset, **OFTEN), run)
    opened = open_run(str(elsewhere(run).path))
    assert opened.notes == []
    other = open_run(whole.path)
    for at in ("latest", "step-12"):
        one, two = (each.temperatures(at).frame(slice(0, 50)) for each in (opened, other))
        assert one.equals(two)


def test_a_selection_goes_with_the_run(pairs_dataset, run, tmp_path, elsewhere):
    kept = np.arange(100, 1000)
    pq.write_table(pa.table({"sample_id": kept}), tmp_path / "kept.parquet")
    settings = {"batch_size": 64, "data": {"path": str(pairs_dataset.path), "image_size": 16,
                                            "select": str(tmp_path / "kept.parquet")}}  # fmt: skip
    config = small(pairs_dataset, **OFTEN, **settings)
    on_disk = RunDirectory(tmp_path / "run")
    train(config, on_disk)
    with pytest.raises(KeyboardInterrupt):
        train(config, run, on_report=stop_at(9))
    run = elsewhere(run)
    train(config, run, resume=True)
    assert_same_run(run, on_disk)
    np.testing.assert_array_equal(StateReader.open(elsewhere(run, "third").state).selection.ids, kept)


def test_credentials_are_in_nothing_that_is_written(pairs_dataset, run, scratch, caplog, s3, impatient):
    config = small(pairs_dataset, **OFTEN)

    def away(report):  # errors are logged, too
        if report.step == 5:
            gateway.stop()
        if report.step == 8:
            gateway.start()

    with s3.gateway() as gateway:
        train(config, run, on_report=away)
    written = [(run.path / name).read(1 << 30) for name, _ in run.path.objects()]
    written += [file.read_bytes() for file in scratch.rglob("*") if file.is_file()]
    written += [caplog.text.encode(), repr(to_tree(run.config())).encode(), repr(read_status(run)).encode()]
    assert len(written) > 20
    assert "was not written" in caplog.text
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        assert not any(os.environ[name].encode() in data for data in written)


def test_a_new_run_at_an_address_with_other_objects_is_refused(pairs_dataset, run):
    (run.path / "thesis.tex").write(b"mine")
    with pytest.raises(RunExistsError, match="has objects below it"):
        train(resolve(load_config(to_tree(small(pairs_dataset))), pairs_dataset), run)
    assert [name for name, _ in run.path.objects()] == ["thesis.tex"]


@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_write_their_rows_of_a_snapshot_into_the_bucket(pairs_dataset, run, start_ranks, tmp_path, machines):
    settings = ["checkpoint.every_steps=4", "batch_size=256", "epochs=1", "log_every=1", "data.image_size=16",
                "model.dim=16", "model.image.config.width=8"]  # fmt: skip
    arguments = ["--data", pairs_dataset.path, *(word for each in settings for word in ("--set", each))]
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    folders = [tmp_path / f"scratch-{rank % machines}" for rank in range(2)]
    codes = [
        f"os.environ |= {variables | {SCRATCH: str(folder)}}; from thermopile.tools.cli import main; main()"
        for folder in folders
    ]
    for place in (run.path, tmp_path / "run"):
        for program in start_ranks(2, "train", "--out", place, *arguments, codes=codes):
            code, _, errors = program.end()
            assert code == 0, errors
    on_disk = RunDirectory(tmp_path / "run")
    assert_same_weights(run, on_disk)
    assert_same_state(run, on_disk)
