"""Rows under a memory budget, at the edges of what a rank holds and of what its windows say."""

import errno
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from thermopile.state_store.errors import BackgroundError
from thermopile.state_store.store import StateStore
from thermopile.state_store.working_tier import WorkingTier

SAMPLES, BLOCK_ROWS, ROW_BYTES = 240, 20, 32
FIELDS = {f"field_{i}": i / 2 for i in range(6)}


@pytest.fixture
def create(tmp_path):
    """Create a store whose memory holds this many blocks, of a rank that has these samples."""

    def make(budget_blocks, owned=range(SAMPLES), samples=SAMPLES):
        return StateStore.create(
            tmp_path / "state", samples, FIELDS, block_rows=BLOCK_ROWS, dataset_fingerprint="edges", owned=owned,
            memory_budget=budget_blocks * BLOCK_ROWS * ROW_BYTES,
        )  # fmt: skip

    return make


def window(first_step, last_step, *blocks):
    return SimpleNamespace(first_step=first_step, last_step=last_step, blocks=np.array(blocks))


@pytest.mark.parametrize(
    ("owned", "strange", "held"),
    [(range(120), 6, "0 … 5"), (range(120, 240), 5, "6 … 11"), (range(120, 240), 12, "6 … 11")],
)
def test_the_block_next_to_a_rank_s_own_is_refused(create, owned, strange, held):
    store = create(3, owned)
    store.expect([window(1, 9, strange)])
    store._rows.blocks._thread.drain()
    with pytest.raises(BackgroundError, match=f"block {strange}, but this process holds the blocks {held}"):
        store.take(np.array([owned.start]))
    store.close()


def put(store, ids, step):
    values = {name: 1000 * step + ids + i for i, name in enumerate(FIELDS)}
    store.put(ids, {name: torch.from_numpy(value).float() for name, value in values.items()}, step=step)


def test_a_short_last_block_leaves_the_memory_and_comes_back(create):
    with create(1, range(230), samples=230) as store:
        last, first = np.arange(220, 230), np.arange(20)
        for step, ids in enumerate((last, first, last, first), 1):
            store.take(ids)
            put(store, ids, step)
        for step, ids in ((3, last), (4, first)):
            np.testing.assert_array_equal(store.take(ids)["field_2"], 1000 * step + ids + 2)


def test_a_block_whose_window_is_over_makes_room_before_any_that_is_needed(create, monkeypatch):
    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with create(2) as store:
        store.expect([window(1, 1, 0), window(1_000, 2_000, 1)])
        ids = np.arange(BLOCK_ROWS)
        store.take(ids)
        with monkeypatch.context() as full:  # else the thread would have made room before
            full.setattr(WorkingTier, "write", no_space)
            put(store, ids, 1)
            store.flush()
            store._rows.blocks._thread.drain()
        store.take(ids + 2 * BLOCK_ROWS)
        store.take(ids + BLOCK_ROWS)
        assert store.blocks_read == 3


def test_a_store_that_is_closed_reads_no_further_block_ahead(create, monkeypatch):
    store, reads, started, ended = create(4), [], threading.Event(), threading.Event()
    read, thread = WorkingTier.read, store._rows.blocks._thread
    close = thread.close

    def read_until_closed(tier, block):
        reads.append(block)
        started.set()
        ended.wait(60)
        return read(tier, block)

    def end():
        ended.set()
        close()

    monkeypatch.setattr(WorkingTier, "read", read_until_closed)
    monkeypatch.setattr(thread, "close", end)
    store.expect([window(1, 9, 0, 1, 2)])
    started.wait(60)
    store.close()
    assert reads == [0]
