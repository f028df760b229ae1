import errno
import logging
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from thermopile.state_store import (
    BackgroundError,
    DuplicateIdError,
    FieldError,
    SampleIdError,
    SnapshotError,
    StateReader,
    StepError,
    StoreClosedError,
    StoreLockedError,
    list_snapshots,
)

IDS = np.array([2, 99, 40])


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_unseen_sample_starts_at_its_initial_values_with_no_visit(create):
    state = create().take(IDS)
    assert state["image/log_s"].tolist() == [-math.inf] * 3
    assert state["image/tau"].tolist() == [np.float32(0.05)] * 3
    assert state["visits"].tolist() == [0, 0, 0]


def test_take_gives_each_field_as_a_contiguous_float32_tensor_and_visits_as_int32(create):
    state = create().take(torch.from_numpy(IDS))
    assert list(state) == ["image/log_s", "image/tau", "visits"]
    assert all(tensor.shape == (3,) and tensor.is_contiguous() for tensor in state.values())
    assert [tensor.dtype for tensor in state.values()] == [torch.float32, torch.float32, torch.int32]


def test_take_returns_rows_in_the_order_of_the_ids_asked_for(create, new_rows):
    store = create()
    store.put(IDS, new_rows(3, 1.0, spread=True), step=1)
    assert store.take(np.array([40, 2, 3, 40, 99]))["image/tau"].tolist() == pytest.approx([3, 1, 0.05, 3, 2])


def test_a_batch_may_be_empty(create, new_rows):
    store = create()
    none = np.array([], dtype=np.int64)
    store.prefetch(none)
    store.put(none, new_rows(0), step=1)
    assert store.take(none)["image/tau"].shape == (0,)


def test_put_counts_visits_and_notes_the_step_whatever_the_state_says(create, path, new_rows):
    store = create()
    for step in (3, 8):
        store.put(IDS, new_rows(3) | {"visits": torch.full((3,), 1000)}, step=step)
    assert store.take(IDS)["visits"].tolist() == [2, 2, 2]
    store.snapshot(8, epoch=0).result()
    assert StateReader.open(path).column("last_step")[IDS].tolist() == [8, 8, 8]


def test_the_caller_may_reuse_its_buffers_after_put_and_change_what_it_took(create, new_rows, hold_rows_thread):
    store = create()
    store.put(np.array([0]), new_rows(1, math.nan), step=1)
    ids, state = torch.from_numpy(IDS.copy()), new_rows(3, 1.0)
    store.put(ids, state, step=2)
    ids.zero_()
    for tensor in state.values():
        tensor.zero_()
    hold_rows_thread.let_go.set()
    taken = store.take(IDS)
    assert taken["image/tau"].tolist() == [1.0, 1.0, 1.0]
    taken["image/tau"].zero_()
    assert store.take(IDS)["image/tau"].tolist() == [1.0, 1.0, 1.0]


def test_put_takes_state_that_is_part_of_a_graph(create, new_rows):
    store = create()
    store.put(IDS, {name: row.requires_grad_() * 2 for name, row in new_rows(3).items()}, step=1)
    taken = store.take(IDS)["image/tau"]
    assert taken.tolist() == [2.0, 2.0, 2.0]
    assert not taken.requires_grad


@pytest.mark.parametrize("prefetched", [False, True])
def test_take_after_put_sees_the_new_values_while_the_put_is_still_under_way(
    create, new_rows, hold_rows_thread, prefetched
):
    store = create()
    if prefetched:
        store.prefetch(IDS)
    store.put(np.array([0]), new_rows(1, math.nan), step=1)
    hold_rows_thread.reached.wait()
    store.put(IDS, new_rows(3, 1.0), step=2)
    threading.Timer(0.1, hold_rows_thread.let_go.set).start()
    assert store.take(IDS)["image/tau"].tolist() == [1.0, 1.0, 1.0]


def test_take_waits_for_no_put_of_other_samples(create, new_rows, hold_rows_thread):
    store = create()
    ahead = np.array([7, 8])
    store.prefetch(ahead)
    store.put(np.array([0]), new_rows(1, math.nan), step=1)
    hold_rows_thread.reached.wait()
    store.put(IDS, new_rows(3, 1.0), step=2)
    # The thread that writes rows stands still: a take that waited for it would end in the test's time-out.
    assert store.take(ahead)["visits"].tolist() == [0, 0]
    assert store.take(np.array([9]))["visits"].tolist() == [0]


def test_a_prefetched_batch_is_brought_up_to_date_with_every_later_put(create, new_rows):
    store = create()
    batch = np.array([1, 2, 3, 40, 99])
    store.prefetch(batch)
    store.put(np.array([3, 50, 2]), new_rows(3, 1.0, spread=True), step=1)
    store.flush()
    store.put(np.array([40, 2]), new_rows(2, 10.0, spread=True), step=2)
    state = store.take(batch)
    assert state["image/tau"].tolist() == pytest.approx([0.05, 11, 1, 10, 0.05])
    assert state["visits"].tolist() == [0, 2, 1, 1, 0]


def test_prefetches_may_be_made_steps_ahead_skipped_or_repeated(create, new_rows):
    store = create()
    batches = [np.array([step, step + 1, 50]) for step in range(40)]
    for batch in batches:
        store.prefetch(batch)
    for step, batch in enumerate(batches, start=1):
        if step % 5:
            assert store.take(batch)["visits"].tolist() == [0 if step == 1 else 1, 0, step - 1]
        store.put(batch, new_rows(3), step=step)
    assert store.take(batches[0])["visits"].tolist() == [1, 2, 40]


def test_a_prefetched_batch_is_handed_out_once(create):
    store = create()
    for batch in (np.array([7]), IDS):
        store.prefetch(batch)
    store.take(IDS)["image/tau"].zero_()
    assert store.take(IDS)["image/tau"].tolist() == [np.float32(0.05)] * 3


def test_a_row_that_is_not_finite_is_refused_counted_and_logged_and_the_old_row_stays(create, path, new_rows, caplog):
    store = create()
    store.put(IDS, new_rows(3, 1.0), step=1)
    state = new_rows(3, 2.0)
    state["image/tau"][0], state["image/log_s"][2] = math.nan, -math.inf
    with caplog.at_level(logging.WARNING):
        store.put(IDS, state, step=2)
        store.flush()
    assert store.refused_rows == 2
    assert [record.getMessage() for record in caplog.records] == [
        "put of step 2: 2 of 3 new rows are not finite and were refused; sample ids: 2, 40"
    ]
    after = store.take(IDS)
    assert (after["image/tau"].tolist(), after["visits"].tolist()) == ([1.0, 2.0, 1.0], [1, 2, 1])
    store.snapshot(2, epoch=0).result()
    assert StateReader.open(path).column("last_step")[IDS].tolist() == [1, 2, 1]


def test_a_log_of_many_refused_rows_names_the_first_twenty(create, new_rows, caplog):
    store = create()
    store.put(np.arange(100), new_rows(100, math.inf), step=1)
    store.flush()
    (record,) = caplog.records
    assert record.getMessage().endswith("18, 19, …")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("image/tau"), r"missing fields: \['image/tau'\]; unknown fields: none"),
        (lambda state: state.update(tau=torch.ones(3)), r"missing fields: none; unknown fields: \['tau'\]"),
        (lambda state: state.update({"image/tau": torch.ones(2)}), r"float32 of shape \(2,\); pass .* of shape \(3,\)"),
        (lambda state: state.update({"image/tau": torch.ones(3, 1)}), r"float32 of shape \(3, 1\)"),
        (lambda state: state.update({"image/tau": torch.ones(3).double()}), "'image/tau' of the put is torch.float64"),
    ],
)
def test_a_put_of_other_fields_shapes_or_dtypes_is_refused_whole(create, new_rows, change, message):
    store = create()
    state = new_rows(3)
    change(state)
    with pytest.raises(FieldError, match=message):
        store.put(IDS, state, step=1)
    assert store.take(IDS)["visits"].tolist() == [0, 0, 0]


def test_an_id_outside_the_store_is_refused_by_every_call(create, new_rows):
    store = create()
    outside = np.array([1, 100])
    for call in (store.prefetch, store.take, lambda ids: store.put(ids, new_rows(2), step=1)):
        with pytest.raises(SampleIdError, match="sample id 100 is outside 0 … 99"):
            call(outside)


def test_a_put_with_a_repeated_id_is_refused_naming_it(create, new_rows):
    store = create()
    with pytest.raises(DuplicateIdError, match="sample id 5 occurs at positions"):
        store.put(np.array([5, 1, 5]), new_rows(3), step=1)
    assert store.take(np.array([1]))["visits"].tolist() == [0]


@pytest.mark.parametrize("step", [0, -1, 2**32])
def test_a_step_that_last_step_cannot_tell_from_never_or_cannot_hold_is_refused(create, new_rows, step):
    store = create()
    with pytest.raises(StepError, match=f"step {step} is outside 1 … 4294967295"):
        store.put(IDS, new_rows(3), step=step)
    with pytest.raises(StepError):
        store.snapshot(step, epoch=0)


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
    with pytest.raises(StoreLockedError, match=f"pid {os.getpid()} on "):
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


def test_a_failed_write_of_rows_is_raised_by_every_later_call_and_nothing_more_is_committed(create, path, new_rows):
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
        broken.setattr("thermopile.files.sync_file_system", no_space)
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
        broken.setattr("thermopile.files.sync_file_system", no_space)
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
        broken.setattr("thermopile.files.sync_file_system", no_space)
        store.snapshot(1, epoch=0)
        store._snapshot_thread.drain()
    with pytest.raises(SnapshotError, match="No space left on device"):
        call(store)
    store.close()


def test_a_failed_snapshot_takes_no_step_back_that_a_later_one_has_taken(create, monkeypatch):
    store = create()
    with monkeypatch.context() as broken:
        broken.setattr("thermopile.files.sync_file_system", no_space)
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
        broken.setattr("thermopile.files.sync_file_system", no_space)
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


def test_retention_keeps_the_newest_the_multiples_and_the_first(create, path):
    store = create()
    for step in range(1, 8):
        store.snapshot(step, epoch=0)
    store.retain(keep_last=2, keep_every=3).result()
    assert [snapshot.step for snapshot in list_snapshots(path)] == [0, 3, 6, 7]


def test_a_retention_that_cannot_be_meant_is_refused(create):
    store = create()
    for keep_last, keep_every in [(0, 0), (-1, 5), (1, -1)]:
        with pytest.raises(ValueError, match=f"keep_last {keep_last} must be at least 1, and keep_every {keep_every}"):
            store.retain(keep_last, keep_every)


@pytest.mark.parametrize("sizes", [{"samples": 0}, {"block_rows": 0}])
def test_a_store_without_samples_or_rows_in_a_block_is_refused(create, path, sizes):
    with pytest.raises(ValueError, match="both must be at least 1"):
        create(**sizes)
    assert not path.exists()


def test_a_store_left_open_does_not_keep_the_process_alive(path):
    program = (
        "import sys, numpy, torch; from thermopile.state_store import StateStore\n"
        "store = StateStore.create(sys.argv[1], 10, {'tau': 0.1}, block_rows=4, dataset_fingerprint='d')\n"
        "store.put(numpy.arange(3), {'tau': torch.ones(3)}, step=1)\n"
        "store.snapshot(1, epoch=0)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=120)
    assert StateReader.open(path).column("visits").sum() == 3


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def steps_on(device, store, steps=20, b=32):
    """Take, change and put rows on `device`, prefetching two steps ahead; return what the last take gave."""
    batches = [np.random.default_rng(step).choice(100, b, replace=False) for step in range(steps)]
    store.prefetch(batches[0])
    store.prefetch(batches[1])
    for step, ids in enumerate(batches):
        if step + 2 < steps:
            store.prefetch(batches[step + 2])
        state = store.take(ids)
        busy = torch.ones(500, 500, device=device) @ torch.ones(500, 500, device=device)
        new = dict.fromkeys(("image/log_s", "image/tau"), state["visits"] + step + 0 * busy[0, 0])
        new = {name: row.float() for name, row in new.items()}
        store.put(ids, new, step=step + 1)
        for row in new.values():
            row.zero_()  # the caller may use its tensors again at once
    return {name: row.cpu() for name, row in store.take(np.arange(100)).items()}


@needs_gpu
def test_steps_on_the_gpu_leave_the_same_rows_as_on_the_cpu(create, tmp_path):
    on_gpu = steps_on("cuda", create(device="cuda"))
    on_cpu = steps_on("cpu", create(path=tmp_path / "other"))
    for name, row in on_cpu.items():
        assert torch.equal(on_gpu[name], row), name


@needs_gpu
def test_take_and_put_never_make_the_host_wait_for_the_gpu(create, new_rows):
    store = create(device="cuda")
    steps_on("cuda", store)  # the first steps allocate
    new = {name: row.cuda() for name, row in new_rows(3).items()}
    store.prefetch(IDS)
    store.flush()
    torch.cuda.set_sync_debug_mode("error")
    try:
        store.take(IDS)
        store.put(IDS, new, step=100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
