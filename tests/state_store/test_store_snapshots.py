"""Snapshots of a store in use, its failures, and its end."""

import errno
import logging
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from thermopile.state_store.errors import BackgroundError, SnapshotError, StepError, StoreClosedError, StoreLockedError
from thermopile.state_store.reader import StateReader

IDS = np.array([2, 99, 40])


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_steps_of_snapshots_rise(create):
    store = create()
    store.snapshot(5, epoch=0)
    with pytest.raises(StepError, match="cannot snapshot step 5 after step 5"):
        store.snapshot(5, epoch=0)


def test_a_snapshot_holds_every_put_before_it_and_none_after(create, path, new_rows, hold_rows_thread):
    store = create()
    store.put(np.array([0]), new_rows(1, math.nan), step=1)
    store.put(IDS, new_rows(3, 1.0), step=2)
    snapshot = store.snapshot(2, epoch=0)
    store.put(IDS[:2], new_rows(2, 5.0), step=3)
    assert not snapshot.done()
    hold_rows_thread.let_go.set()
    snapshot.result()
    assert StateReader.open(path).column("image/tau")[IDS].tolist() == [1.0, 1.0, 1.0]
    store.snapshot(3, epoch=0).result()
    assert StateReader.open(path).column("image/tau")[IDS].tolist() == [5.0, 5.0, 1.0]


def test_a_snapshot_without_a_change_is_made_all_the_same(create, path):
    store = create()
    store.snapshot(1, epoch=0).result()
    assert store.snapshot(2, epoch=0).result() == StateReader.open(path).snapshot


def test_resuming_brings_back_every_row_of_the_snapshot_and_no_later_one(create, resume, new_rows):
    store = create(block_rows=7)
    everything = np.arange(100)
    store.put(everything, new_rows(100, 1.0, spread=True), step=1)
    store.snapshot(1, epoch=0).result()
    before = store.take(everything)
    store.put(IDS, new_rows(3, 9.0), step=2)
    store.close()
    after = resume().take(everything)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_resumed_store_goes_on_from_the_snapshots_step(create, resume):
    store = create()
    store.snapshot(5, epoch=0)
    store.snapshot(9, epoch=1)
    store.close()
    resumed = resume(at="step-5")
    assert resumed.last_snapshot.step == 5
    assert resumed.snapshot(6, epoch=0).result().tag == "step-6"


def test_flush_waits_for_puts_and_snapshots(create, path, new_rows):
    store = create()
    store.put(IDS, new_rows(3), step=1)
    snapshot = store.snapshot(1, epoch=0)
    store.flush()
    assert snapshot.done()


def test_close_finishes_the_snapshots_asked_for(create, path, new_rows):
    with create() as store:
        store.put(IDS, new_rows(3), step=1)
        store.snapshot(1, epoch=0)
    assert StateReader.open(path).snapshot.tag == "step-1"


def test_a_closed_store_can_be_closed_again_and_nothing_else(create, new_rows):
    store = create()
    store.close()
    store.close()
    for call in (
        lambda: store.take(IDS),
        lambda: store.prefetch(IDS),
        lambda: store.put(IDS, new_rows(3), step=1),
        lambda: store.snapshot(1, epoch=0),
        store.flush,
    ):
        with pytest.raises(StoreClosedError, match="is closed; open it again"):
            call()


# Python 3.12 warns of any fork beside threads; the fork is what is tested here, and the child touches no thread.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_that_the_store_belongs_to_its_parent(create):
    store = create()
    child = os.fork()
    if child == 0:
        told = 0
        for call in (lambda: store.take(IDS), store.close):
            try:
                call()
            except StoreClosedError as error:
                told += f"belongs to process {os.getppid()}" in str(error)
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_a_second_writer_is_refused_and_the_store_stays_usable(create, resume, path):
    store = create()
    with pytest.raises(StoreLockedError, match=f"written by pid {os.getpid()} on .* \\(lock: {path}.lock\\)"):
        resume()
    store.take(IDS)
    store.close()
    resume()


def test_a_refused_create_or_open_holds_no_lock(create, resume):
    with pytest.raises(RuntimeError):
        create(device="no such device")
    create().close()
    with pytest.raises(LookupError):
        resume(at="step-1")
    resume()


def test_a_failed_write_of_rows_is_raised_by_every_later_call_and_ends_commits(create, path, new_rows):
    class BrokenPipe(logging.Handler):
        def emit(self, record):
            raise OSError("the log's pipe is broken")

    store, handler = create(), BrokenPipe()
    logger = logging.getLogger("thermopile.state_store.transfer")
    logger.addHandler(handler)
    try:
        store.put(IDS, new_rows(3, math.nan), step=1)
        with pytest.raises(BackgroundError) as raised:
            store.flush()
    finally:
        logger.removeHandler(handler)
    assert isinstance(raised.value.__cause__, OSError)
    for call in (
        lambda: store.take(IDS),
        lambda: store.put(IDS, new_rows(3), step=2),
        lambda: store.snapshot(2, epoch=0),
    ):
        with pytest.raises(BackgroundError, match=r"pipe is broken.*resume at the last snapshot"):
            call()
    store.close()
    assert StateReader.open(path).snapshot.tag == "step-0"


def test_a_failed_snapshot_leaves_rows_and_training_as_they_were(create, path, new_rows, monkeypatch):
    store = create()
    store.put(IDS, new_rows(3), step=1)
    with monkeypatch.context() as broken:
        broken.setattr("thermopile.storage.files.sync_file_system", no_space)
        with pytest.raises(SnapshotError, match="No space left on device"):
            store.snapshot(1, epoch=0).result()
    assert StateReader.open(path).snapshot.tag == "step-0"
    store.put(IDS[:1], new_rows(1, 2.0), step=2)
    assert store.take(IDS)["image/tau"].tolist() == [2.0, 1.0, 1.0]
    assert store.snapshot(2, epoch=0).result().tag == "step-2"
    reader = StateReader.open(path)
    assert reader.column("image/tau")[IDS].tolist() == [2.0, 1.0, 1.0]
    assert reader.column("visits")[IDS].tolist() == [2, 1, 1]


def test_a_step_whose_snapshot_failed_can_be_snapshotted_again(create, new_rows, monkeypatch):
    store = create()
    store.put(IDS, new_rows(3), step=1)
    with monkeypatch.context() as broken:
        broken.setattr("thermopile.storage.files.sync_file_system", no_space)
        assert store.snapshot(1, epoch=0).exception() is not None
    assert store.snapshot(1, epoch=0).result().step == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.snapshot(2, epoch=0),
        lambda store: store.retain(1),
        lambda store: store.flush(),
        lambda store: store.close(),
    ],
    ids=["snapshot", "retain", "flush", "close"],
)
def test_a_failed_snapshot_that_nobody_asked_about_is_raised_once_by_a_later_call(create, call, monkeypatch):
    store = create()
    with monkeypatch.context() as broken:
        broken.setattr("thermopile.storage.files.sync_file_system", no_space)
        store.snapshot(1, epoch=0)
        store._snapshot_thread.drain()
    with pytest.raises(SnapshotError, match="No space left on device"):
        call(store)
    store.close()


def test_a_failed_snapshot_takes_no_step_back_that_a_later_one_has_taken(create, monkeypatch):
    store = create()
    with monkeypatch.context() as broken:
        broken.setattr("thermopile.storage.files.sync_file_system", no_space)
        assert store.snapshot(10, epoch=0).exception() is not None
    store.snapshot(20, epoch=0)
    with pytest.raises(StepError, match="step 15 after step 20"):
        store.snapshot(15, epoch=0)


def test_rows_put_before_a_snapshot_that_fails_at_once_are_in_the_next_one(create, path, new_rows, monkeypatch):
    store = create()
    with monkeypatch.context() as broken:
        broken.setattr("thermopile.state_store.durable.fork", no_space)
        for step in range(1, 6):
            store.put(np.arange(100), new_rows(100, float(step)), step=step)
        assert store.snapshot(5, epoch=0).exception() is not None
    store.snapshot(6, epoch=0).result()
    assert StateReader.open(path).column("visits").tolist() == [5] * 100


def test_an_open_that_fails_half_way_frees_the_lock(create, resume, monkeypatch):
    create().close()
    with monkeypatch.context() as broken:
        broken.setattr("thermopile.state_store.durable.Repository.undo_after", no_space)
        with pytest.raises(OSError, match="No space left on device"):
            resume()
    resume()


def test_a_failed_close_frees_the_lock_all_the_same(create, resume, monkeypatch):
    store = create()
    with monkeypatch.context() as broken:
        broken.setattr("thermopile.storage.files.sync_file_system", no_space)
        store.snapshot(1, epoch=0)
        with pytest.raises(SnapshotError):
            store.close()
    resume()


def test_a_snapshot_asked_for_while_one_is_written_has_the_rows_of_its_own_step(create, path, new_rows):
    store = create()
    futures = []
    for step in range(1, 6):
        store.put(IDS, new_rows(3, float(step)), step=step)
        futures.append(store.snapshot(step, epoch=0))
    for step, future in enumerate(futures, start=1):
        assert StateReader.open(path, future.result().id).column("image/tau")[IDS].tolist() == [step] * 3


def test_a_retention_that_cannot_be_meant_is_refused(create):
    store = create()
    for keep_last, keep_every in [(0, 0), (-1, 5), (1, -1)]:
        with pytest.raises(ValueError, match=f"keep_last {keep_last} must be at least 1, and keep_every {keep_every}"):
            store.retain(keep_last, keep_every)
    for keep_early in (-1, 10):
        with pytest.raises(ValueError, match=f"keep_early {keep_early} is not within 0 … 9"):
            store.retain(1, 0, keep_early)


@pytest.mark.parametrize("sizes", [{"samples": 0}, {"block_rows": 0}])
def test_a_store_without_samples_or_rows_in_a_block_is_refused(create, path, sizes):
    with pytest.raises(ValueError, match="both must be at least 1"):
        create(**sizes)
    assert not path.exists()


@pytest.mark.wide
def test_a_store_left_open_does_not_keep_the_process_alive(path):
    program = (
        "import sys, numpy, torch; from thermopile.state_store.store import StateStore\n"
        "store = StateStore.create(sys.argv[1], 10, {'tau': 0.1}, block_rows=4, dataset_fingerprint='d')\n"
        "store.put(numpy.arange(3), {'tau': torch.ones(3)}, step=1)\n"
        "store.snapshot(1, epoch=0)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=120)
    assert StateReader.open(path).column("visits").sum() == 3
