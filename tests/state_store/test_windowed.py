"""Rows under a memory budget, against rows all in memory; the windows are those of a real order."""

import errno
import logging
import os
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

from thermopile.pipeline.order.order import Order
from thermopile.state_store.errors import BackgroundError, DamagedChunkError, MemoryBudgetError
from thermopile.state_store.reader import StateReader
from thermopile.state_store.store import StateStore
from thermopile.storage.files import NotRegularFileError

FIELDS = {f"field_{i}": i / 2 for i in range(6)}  # with visits and last_step: 32 bytes a row
ROW_BYTES = 32


def make_store(path, order, budget_blocks):
    return StateStore.create(
        path,
        order.samples,
        FIELDS,
        block_rows=order.block_rows,
        dataset_fingerprint="windows",
        memory_budget=None if budget_blocks is None else int(budget_blocks * order.block_rows * ROW_BYTES),
    )


@dataclass
class Steps:
    """The steps of some epochs, and their windows, numbered as puts are."""

    order: Order
    epochs: int

    def __len__(self):
        return self.epochs * self.order.steps_per_epoch

    def ids(self, number):
        return self.order.batch_ids(*divmod(number - 1, self.order.steps_per_epoch))

    def windows(self):
        for epoch in range(self.epochs):
            shift = epoch * self.order.steps_per_epoch + 1
            for window in self.order.windows(epoch):
                yield replace(window, first_step=window.first_step + shift, last_step=window.last_step + shift)


def train(store, steps, first=1, last=None, ahead=2):
    """Take and put every step's rows; the new ones depend on the old ones, so that any mistake is handed on."""
    last = len(steps) if last is None else last
    prefetched = first - 1
    for number in range(first, last + 1):
        while prefetched < min(number + ahead, len(steps)):
            prefetched += 1
            store.prefetch(steps.ids(prefetched))
        ids = steps.ids(number)
        state = store.take(ids)
        store.put(ids, {name: 0.5 * state[name] + number + i for i, name in enumerate(FIELDS)}, step=number)


def assert_same_snapshot(path, other):
    left, right = StateReader.open(path), StateReader.open(other)
    assert left.snapshot.step == right.snapshot.step
    for name in (*FIELDS, "visits", "last_step"):
        np.testing.assert_array_equal(left.column(name), right.column(name), err_msg=name)


@pytest.fixture
def small():
    """240 samples in 12 blocks of 20; a window of 2 of the 6 blocks of each shard."""
    return Order.create(240, 32, seed=3, canonical_shards=2, blocks_per_shard=6, window_blocks=2)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("samples", "batch", "blocks_per_shard"),
    [
        (10_000, 512, 10),
        pytest.param(200_000, 4_096, 20, marks=pytest.mark.wide),
        pytest.param(2_000_000, 16_384, 60, marks=pytest.mark.soak),
    ],
)
def test_two_epochs_under_a_budget_leave_the_rows_of_a_run_without_one(tmp_path, samples, batch, blocks_per_shard):
    order = Order.create(samples, batch, seed=0, canonical_shards=8, blocks_per_shard=blocks_per_shard, window_blocks=2)
    steps = Steps(order, epochs=2)
    budget = 37  # blocks, of 160 or 480
    with make_store(tmp_path / "windowed", order, budget) as store:
        store.expect(steps.windows())
        train(store, steps)
        store.snapshot(len(steps), epoch=2).result()
        blocks = -(-order.samples // order.block_rows)
        # A block that the first window of an epoch wants again is not read twice.
        assert 1.9 * blocks < store.blocks_read <= 2 * blocks
        assert 1.9 * blocks < store.blocks_written <= 2 * blocks
    with make_store(tmp_path / "resident", order, None) as store:
        train(store, steps)
        store.snapshot(len(steps), epoch=2).result()
        assert store.blocks_read == store.blocks_written == 0
    assert_same_snapshot(tmp_path / "windowed", tmp_path / "resident")


def test_snapshots_while_windows_move_and_a_resume_from_one_change_nothing(tmp_path, small):
    steps, budget = Steps(small, epochs=4), 9
    middle = len(steps) // 2
    with make_store(tmp_path / "windowed", small, budget) as store:
        store.expect(steps.windows())
        train(store, steps, last=middle)
        kept = store.snapshot(middle, epoch=2)
        train(store, steps, first=middle + 1, last=middle + 3)
        kept.result()
    with StateStore.open(
        tmp_path / "windowed",
        samples=small.samples,
        fields=FIELDS,
        dataset_fingerprint="windows",
        memory_budget=budget * small.block_rows * ROW_BYTES,
    ) as store:
        store.expect(steps.windows())
        train(store, steps, first=middle + 1)
        store.snapshot(len(steps), epoch=4).result()
        assert store.blocks_read < 3 * 12, "blocks of windows that were over have been read"
    with make_store(tmp_path / "resident", small, None) as store:
        train(store, steps)
        store.snapshot(len(steps), epoch=4).result()
    assert_same_snapshot(tmp_path / "windowed", tmp_path / "resident")


def test_a_block_never_leaves_before_its_window_is_over(tmp_path, small):
    steps, budget = Steps(small, epochs=3), 9
    with make_store(tmp_path / "windowed", small, budget) as store:
        store.expect(steps.windows())
        train(store, steps)
        store.flush()
        blocks = -(-small.samples // small.block_rows)
        assert store.blocks_read <= 3 * blocks


def test_rows_outside_every_window_are_read_when_they_are_taken(tmp_path, small):
    with make_store(tmp_path / "windowed", small, budget_blocks=1) as store:
        for number in range(5):
            state = store.take(np.array([number * small.block_rows]))
            assert state["field_1"].tolist() == [0.5]
        assert store.blocks_read == 5


def test_opening_under_a_budget_reads_no_row(tmp_path, small):
    make_store(tmp_path / "windowed", small, None).close()
    with StateStore.open(
        tmp_path / "windowed",
        samples=small.samples,
        fields=FIELDS,
        dataset_fingerprint="windows",
        memory_budget=3 * small.block_rows * ROW_BYTES,
    ) as store:
        assert store.blocks_read == 0


def test_rows_that_no_step_has_touched_outlive_the_snapshot_that_they_were_opened_at(tmp_path, small):
    with make_store(tmp_path / "windowed", small, budget_blocks=2) as store:
        ids = np.arange(small.block_rows)
        for step in range(1, 4):
            state = store.take(ids)
            store.put(ids, {name: state[name] + step for name in FIELDS}, step=step)
            store.snapshot(step, epoch=0)
            store.retain(1).result()
        untouched = np.arange(100, 110)
        assert store.take(untouched)["field_2"].tolist() == [1.0] * 10
        assert store.take(ids)["field_0"].tolist() == [6.0] * len(ids)


def test_a_budget_below_one_block_is_refused_with_the_size_that_would_do(tmp_path, small):
    with pytest.raises(MemoryBudgetError, match=f"Raise it to {small.block_rows * ROW_BYTES:,} or more"):
        make_store(tmp_path / "windowed", small, budget_blocks=0.99)
    make_store(tmp_path / "windowed", small, budget_blocks=1).close()


def test_a_batch_of_more_blocks_than_the_budget_holds_is_refused_with_a_cure(tmp_path, small):
    with make_store(tmp_path / "windowed", small, budget_blocks=3) as store:
        ids = np.arange(4) * small.block_rows
        with pytest.raises(MemoryBudgetError, match=f"at least {4 * small.block_rows * ROW_BYTES:,} bytes"):
            store.take(ids)
        assert len(store.take(ids[:3])["visits"]) == 3


def test_a_full_disk_stops_the_take_that_needs_room_and_training_goes_on_after(tmp_path, small, monkeypatch, caplog):
    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    blocks = [np.arange(start, start + small.block_rows) for start in range(0, 120, small.block_rows)]
    with make_store(tmp_path / "windowed", small, budget_blocks=2) as store:
        with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
            full.setattr("thermopile.state_store.working_tier.WorkingTier.write", no_space)
            for step in (1, 2):
                state = store.take(blocks[step])
                store.put(blocks[step], {name: state[name] + step for name in FIELDS}, step=step)
            with pytest.raises(OSError, match="No space left on device"):
                store.take(blocks[3])
            store._rows.blocks._thread.drain()
            assert "No space left on device" in caplog.text
        assert store.take(blocks[3])["field_0"].tolist() == [0.0] * small.block_rows
        assert store.take(blocks[1])["field_0"].tolist() == [1.0] * small.block_rows
        assert store.take(blocks[2])["field_0"].tolist() == [2.0] * small.block_rows


@pytest.mark.parametrize("drained", [True, False], ids=["before the take", "during the take"])
def test_windows_that_cannot_be_followed_are_raised_with_their_cause(tmp_path, small, drained):
    asked = threading.Event()

    def broken():
        asked.wait(0 if drained else 0.2)
        raise RuntimeError("no such epoch")
        yield

    store = make_store(tmp_path / "windowed", small, budget_blocks=3)
    store.expect(broken())
    if drained:
        store._rows.blocks._thread.drain()
    else:
        store.take(np.array([0]))  # what it needs comes all the same
    with pytest.raises(BackgroundError, match="no such epoch") as raised:
        store.take(np.array([0]))
    assert isinstance(raised.value.__cause__, RuntimeError)
    store.close()


def test_windows_of_another_rank_are_refused_and_touch_no_row(tmp_path, small):
    store = StateStore.create(
        tmp_path / "half",
        small.samples,
        FIELDS,
        block_rows=small.block_rows,
        dataset_fingerprint="windows",
        memory_budget=3 * small.block_rows * ROW_BYTES,
        owned=range(120, 240),
    )
    store.expect(small.windows(0))
    store._rows.blocks._thread.drain()
    with pytest.raises(BackgroundError, match=r"block \d+, but this process holds the blocks 6 … 11"):
        store.take(np.array([130]))
    store.close()


@pytest.mark.parametrize("harm", ["gone", "cut short", "flipped"])
def test_a_damaged_block_of_the_working_tier_is_an_error_that_names_its_file(tmp_path, small, harm):
    with make_store(tmp_path / "windowed", small, budget_blocks=1) as store:
        for step, block in ((1, 0), (2, 3)):
            ids = np.arange(block * small.block_rows, (block + 1) * small.block_rows)
            store.put(ids, store.take(ids), step=step)
        store.flush()
        store._rows.blocks._thread.drain()
        file = tmp_path / "windowed.working" / "rank-0" / "c" / "0" / "0"
        whole = file.read_bytes()
        file.unlink()
        if harm != "gone":
            file.write_bytes(whole[:100] if harm == "cut short" else b"\xff" + whole[1:])
        with pytest.raises(DamagedChunkError, match=str(file)):
            store.take(np.array([0]))


def test_the_working_tier_is_gone_once_the_store_is_closed(tmp_path, small):
    store = make_store(tmp_path / "windowed", small, budget_blocks=2)
    working = tmp_path / "windowed.working"
    assert working.exists()
    store.close()
    assert not working.exists()


@pytest.mark.parametrize("scratch", ["", "scratch"], ids=["", "that_works_in_scratch"])
def test_what_a_killed_run_left_of_its_working_tier_is_deleted_by_the_next_one(tmp_path, monkeypatch, small, scratch):
    monkeypatch.setenv("THERMOPILE_SCRATCH", scratch and str(tmp_path / scratch))
    make_store(tmp_path / "state", small, None).close()
    left = tmp_path / "state.working" / "rank-3"
    left.mkdir(parents=True)
    StateStore.open(tmp_path / "state", samples=small.samples, fields=FIELDS, dataset_fingerprint="windows").close()
    assert not left.exists()


def test_a_working_tier_is_never_written_through_a_link(tmp_path, small):
    outside, working = tmp_path / "outside", tmp_path / "state.working"
    outside.mkdir()
    working.mkdir()
    (working / "rank-0").symlink_to(outside)
    store = make_store(tmp_path / "state", small, budget_blocks=2)
    assert not (working / "rank-0").is_symlink()
    store.close()
    working.symlink_to(outside)
    with pytest.raises(NotRegularFileError, match=r"state\.working is a link"):
        StateStore.open(tmp_path / "state", samples=small.samples, fields=FIELDS, dataset_fingerprint="windows",
                        memory_budget=2 * small.block_rows * ROW_BYTES)  # fmt: skip
    assert list(outside.iterdir()) == []


@pytest.mark.wide
def test_a_block_may_be_larger_than_the_files_that_are_read_whole(tmp_path):
    rows = 2_200_000  # of 32 bytes: above 64 MiB
    with StateStore.create(
        tmp_path / "state", 2 * rows, FIELDS, block_rows=rows, dataset_fingerprint="large", memory_budget=33 * rows
    ) as store:
        for step, row in enumerate((0, rows, 0), start=1):
            store.prefetch(np.array([row]))
            state = store.take(np.array([row]))
            store.put(np.array([row]), {name: values + 1 for name, values in state.items()}, step=step)
        store.prefetch(np.array([0]))
        assert store.take(np.array([0]))["field_2"].item() == 3
