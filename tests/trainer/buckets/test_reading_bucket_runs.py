"""A run in a bucket is read from anywhere, and what is written there is what belongs there."""

import os
import time
from socket import gethostname

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile import open_run
from thermopile.state_store.reader import StateReader
from thermopile.storage.bucket import SCRATCH, Address
from thermopile.storage.place import lock_status
from thermopile.trainer.checkpoints.checkpoint_files import checkpoints_in
from thermopile.trainer.config import load_config, to_tree
from thermopile.trainer.errors import RunError, RunExistsError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run import run_status
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run.run_status import read_status
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.datasets import named_ids
from support.runs import (
    OFTEN,
    SMALL,
    assert_same_run,
    assert_same_state,
    assert_same_weights,
    finish,
    small,
    stopped,
    train,
)

pytestmark = pytest.mark.wide


def test_status_is_read_from_another_machine_with_the_age_of_the_last_part(pairs_dataset, run, elsewhere, monkeypatch):
    config = small(pairs_dataset, **OFTEN)
    seen = []

    def look(report):
        if report.step == 9:
            trainer.run.checkpointer.wait()
            seen.append(read_status(elsewhere(run)))

    with Trainer.open(config, run) as trainer:
        trainer.train(on_report=look)
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


def test_status_says_at_once_on_the_same_machine_that_a_run_was_killed(pairs_dataset, run, start_program, elsewhere):
    settings = sets("checkpoint.every_steps=1", *SMALL)
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", SCRATCH))}
    program = start_program("train", "--out", run.path, "--data", pairs_dataset.path, *settings, **variables)
    deadline = time.monotonic() + 100
    while not checkpoints_in(run.checkpoints) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert read_status(run).state == "running"
    program.kill()
    program.end()
    assert (read_status(run).state, read_status(run).writer) == ("stopped", f"pid {program.pid} on {gethostname()}")
    assert read_status(elsewhere(run)).state == "running"


def test_a_run_that_holds_its_lock_but_writes_nothing_is_silent(pairs_dataset, run, monkeypatch):
    with Trainer.open(small(pairs_dataset, **OFTEN), run) as trainer:
        trainer.train(should_stop=lambda: trainer.run.steps_done >= 5)
        trainer.run.checkpointer.wait()
        lock = lock_status(run.state_lock)
        monkeypatch.setattr(run_status, "lock_status", lambda place: lock)  # still renewed
        assert read_status(run).state == "running"
        monkeypatch.setattr(run_status.time, "time", lambda now=time.time: now() + 10_000)
        assert read_status(run).state == "silent"


def test_a_bucket_that_is_not_there_is_told_from_a_run_that_is_not(s3):
    for place, words in (("s3://bucket/none", "is not a run"), ("s3://no-such-bucket/a", "no bucket no-such-bucket")):
        with pytest.raises(RunError, match=words):
            read_status(RunDirectory(Address.parse(place)))


def test_open_run_reads_a_run_at_its_address(pairs_dataset, run, whole, elsewhere):
    train(small(pairs_dataset, **OFTEN), run)
    opened = open_run(str(elsewhere(run).path))
    assert opened.notes == []
    other = open_run(whole.path)
    for at in ("latest", "step-12"):
        one, two = (each.temperatures(at).frame(slice(0, 50)) for each in (opened, other))
        assert one.equals(two)


def test_a_selection_goes_with_the_run(pairs_dataset, run, tmp_path, elsewhere):
    kept, gone = np.arange(100, 1000), np.arange(103, 1000, 7)
    for name, ids in (("kept", kept), ("gone", gone)):
        pq.write_table(named_ids(pairs_dataset, ids), tmp_path / f"{name}.parquet")
    files = {"select": str(tmp_path / "kept.parquet"), "without": str(tmp_path / "gone.parquet")}
    settings = {"batch_size": 64, "data": {"path": str(pairs_dataset.path), "image_size": 16, **files}}
    config = small(pairs_dataset, **OFTEN, **settings)
    on_disk = RunDirectory(tmp_path / "run")
    train(config, on_disk)
    (run.selection / "mixture.json").rewrite(b"of a killed start on a mixture")
    run = elsewhere(stopped(config, run, 9))
    train(config, run, resume=True)
    assert_same_run(run, on_disk)
    found = StateReader.open(elsewhere(run, "third").state).selection
    np.testing.assert_array_equal(found.ids, kept)
    np.testing.assert_array_equal(found.without, gone - 100)


def test_credentials_are_in_nothing_that_is_written(pairs_dataset, run, scratch, caplog, s3, impatient):
    config = small(pairs_dataset, **OFTEN)

    def away(report):  # errors are logged, too
        if report.step == 5:
            gateway.stop()
        if report.step == 8:
            gateway.start()

    with s3.gateway() as gateway:
        train(config, run, on_report=away)
    written = [(run.path / name).read_bytes(1 << 30) for name, _, _ in run.path.listing()]
    written += [file.read_bytes() for file in scratch.rglob("*") if file.is_file()]
    written += [caplog.text.encode(), repr(to_tree(run.config())).encode(), repr(read_status(run)).encode()]
    assert len(written) > 20
    assert "was not written" in caplog.text
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        assert not any(os.environ[name].encode() in data for data in written)


def test_a_new_run_at_an_address_with_other_objects_is_refused(pairs_dataset, run):
    (run.path / "thesis.tex").write(b"mine")
    with pytest.raises(RunExistsError, match="has objects below it"):
        train(resolve(load_config(to_tree(small(pairs_dataset))), pairs_dataset)[0], run)
    assert [name for name, _, _ in run.path.listing()] == ["thesis.tex"]


@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_write_their_rows_of_a_snapshot_into_the_bucket(pairs_dataset, run, start_ranks, tmp_path, machines):
    settings = ["checkpoint.every_steps=4", "batch_size=256", "epochs=1", "log_every=1", "data.image_size=16",
                "model.dim=16", "model.image.config.width=8"]  # fmt: skip
    arguments = ["--data", pairs_dataset.path, *sets(*settings)]
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    folders = [tmp_path / f"scratch-{rank % machines}" for rank in range(2)]
    codes = [
        f"os.environ |= {variables | {SCRATCH: str(folder)}}; from thermopile.tools.cli import main; main()"
        for folder in folders
    ]
    for place in (run.path, tmp_path / "run"):
        finish(start_ranks(2, "train", "--out", place, *arguments, codes=codes))
    on_disk = RunDirectory(tmp_path / "run")
    assert_same_weights(run, on_disk)
    assert_same_state(run, on_disk)
