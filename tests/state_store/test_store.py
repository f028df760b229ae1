"""Taking and putting rows."""

import logging
import math
import threading

import numpy as np
import pytest
import torch

from thermopile.state_store.errors import DuplicateIdError, FieldError, SampleIdError, StepError
from thermopile.state_store.reader import StateReader

from support.waits import no_waits

IDS = np.array([2, 99, 40])


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


def test_a_row_that_is_not_finite_is_refused_counted_and_logged(create, path, new_rows, caplog):
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


@pytest.mark.gpu
def test_steps_on_the_gpu_leave_the_same_rows_as_on_the_cpu(create, tmp_path):
    on_gpu = steps_on("cuda", create(device="cuda"))
    on_cpu = steps_on("cpu", create(path=tmp_path / "other"))
    for name, row in on_cpu.items():
        assert torch.equal(on_gpu[name], row), name


@pytest.mark.gpu
def test_take_and_put_never_make_the_host_wait_for_the_gpu(create, new_rows):
    store = create(device="cuda")
    steps_on("cuda", store)  # the first steps allocate
    new = {name: row.cuda() for name, row in new_rows(3).items()}
    store.prefetch(IDS)
    store.flush()
    with no_waits():
        store.take(IDS)
        store.put(IDS, new, step=100)
