"""Windows of the sample order: which blocks are live at a step, and which window fits a memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermopile.pipeline.order.order import MAX_BLOCK_ROWS, Order, Window

from support.orders import EPOCHS, MANY, ORDERS, SHARDS, SOME, epoch_ids, full_shuffles, shard_sequence, windowed


def max_live_blocks(order: Order, epoch: int) -> int:
    """Most blocks between their first and last use at one step, from the ids alone."""
    blocks = epoch_ids(order, epoch) // order.block_rows
    changes = np.zeros(len(blocks) + 1, dtype=np.int64)
    for block in np.unique(blocks):
        steps = np.flatnonzero((blocks == block).any(axis=1))
        changes[steps[0]] += 1
        changes[steps[-1] + 1] -= 1
    return int(changes.cumsum().max())


# Windows


@MANY
@given(windowed(), EPOCHS)
def test_live_blocks_never_exceed_window_plus_two_per_shard(order: Order, epoch: int) -> None:
    assert max_live_blocks(order, epoch) <= (order.window_blocks + 2) * order.canonical_shards


@pytest.mark.parametrize("window", range(1, 17))
def test_live_blocks_stay_bounded_when_the_short_block_moves_the_last_shards_windows(window: int) -> None:
    order = Order.create(8 * 24 * 260 - 190, 8 * 256, canonical_shards=8, blocks_per_shard=24, window_blocks=window)
    assert order.block_rows == 260
    assert max(max_live_blocks(order, epoch) for epoch in range(4)) <= (window + 2) * 8


def test_a_window_mixes_all_its_blocks() -> None:
    order = Order.create(8 * 64, 64, canonical_shards=4, blocks_per_shard=8, window_blocks=4)
    in_a_window = shard_sequence(order, 0, shard=3)[: order.block_rows] // order.block_rows
    assert len(np.unique(in_a_window)) == 4


def test_a_window_as_wide_as_the_shard_is_a_full_shuffle() -> None:
    full = Order.create(10_000, 128, blocks_per_shard=6)
    assert full.window_blocks == 6
    assert Order.create(10_000, 128, blocks_per_shard=6, window_blocks=6) == full
    assert Order.create(10_000, 128, blocks_per_shard=6, window_blocks=99) == full
    assert len(np.unique(shard_sequence(full, 0, shard=0)[:100] // full.block_rows)) == 6


# Which blocks a step needs


def windows(order: Order, epoch: int, rank: int = 0, world: int = 1) -> list[Window]:
    return list(order.windows(epoch, rank, world))


@MANY
@given(st.one_of(ORDERS, ORDERS.map(Order.serving_all)), EPOCHS)
def test_a_window_lasts_from_the_first_to_the_last_step_that_serves_its_ids(order: Order, epoch: int) -> None:
    blocks = epoch_ids(order, epoch) // order.block_rows
    for window in windows(order, epoch):
        steps = np.flatnonzero(np.isin(blocks, window.blocks).any(axis=1))
        assert (window.first_step, window.last_step) == (steps[0], steps[-1])


@MANY
@given(ORDERS, EPOCHS)
def test_every_block_is_in_one_window_unless_the_epoch_ends_before_it(order: Order, epoch: int) -> None:
    used = np.unique(epoch_ids(order, epoch) // order.block_rows)
    listed = np.concatenate([window.blocks for window in order.windows(epoch)])
    assert listed.dtype == np.int64
    assert len(np.unique(listed)) == len(listed)
    assert np.isin(used, listed).all()
    assert 0 <= listed.min() <= listed.max() <= (order.samples - 1) // order.block_rows


@SOME
@given(ORDERS, EPOCHS)
def test_windows_come_by_their_first_steps_with_ascending_blocks_of_one_shard(order: Order, epoch: int) -> None:
    made = windows(order, epoch)
    assert [window.first_step for window in made] == sorted(window.first_step for window in made)
    for window in made:
        assert (np.diff(window.blocks) > 0).all()
        assert len(window.blocks) <= order.window_blocks
        assert len(np.unique(window.blocks // order.blocks_per_shard)) == 1


@SOME
@given(full_shuffles(), EPOCHS)
def test_a_full_shuffle_has_one_window_a_shard_that_lasts_the_whole_epoch(order: Order, epoch: int) -> None:
    made = windows(order, epoch)
    assert len(made) == order.canonical_shards
    assert {(window.first_step, window.last_step) for window in made} == {(0, order.steps_per_epoch - 1)}
    blocks = np.concatenate([window.blocks for window in made])
    assert (blocks == np.arange(-(-order.samples // order.block_rows))).all()


@SOME
@given(ORDERS, EPOCHS, st.data())
def test_a_rank_has_the_windows_and_the_ids_of_its_own_shards(order: Order, epoch: int, data: st.DataObject) -> None:
    world = data.draw(st.sampled_from([w for w in range(1, 9) if order.canonical_shards % w == 0]))
    owned = [order.rank_ids(rank, world) for rank in range(world)]
    assert [i for ids in owned for i in ids] == list(range(order.samples))
    assert all(ids.start % order.block_rows == 0 for ids in owned)
    for rank, ids in enumerate(owned):
        served = order.batch_ids(epoch, 0, rank, world)
        assert ids.start <= served.min() <= served.max() < ids.stop
        mine = [w for w in order.windows(epoch) if w.blocks[0] * order.block_rows in ids]
        assert [str(w) for w in order.windows(epoch, rank, world)] == [str(w) for w in mine]


def test_live_rows_bound_the_rows_of_the_live_windows() -> None:
    order = Order.create(8 * 24 * 260 - 190, 8 * 256, canonical_shards=8, blocks_per_shard=24, window_blocks=16)
    assert order.live_rows == 18 * 8 * 260
    for step in range(order.steps_per_epoch):
        live = [window for window in order.windows(0) if window.first_step <= step <= window.last_step]
        assert sum(len(window.blocks) for window in live) * order.block_rows <= order.live_rows
    assert Order.create(8_000, 128, blocks_per_shard=5).live_rows == 8_000


def test_the_windows_of_a_billion_ids_are_made_one_by_one() -> None:
    next(Order.create(1_000, 128).windows(0))  # compiling takes memory of its own
    tracemalloc.start()
    order = Order.create(10**9, 4096, canonical_shards=8, window_blocks=16)
    counted = sum(len(window.blocks) for window in order.windows(10**6))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counted == 8 * order.blocks_per_shard
    assert peak < 100_000


# A memory that holds fewer rows than there are samples


@pytest.mark.parametrize(
    ("samples", "batch_size", "rows"),
    [(200_000_000, 16_384, 16_000_000), (2_000_000, 512, 156_250), (2_000_000, 4_096, 156_250), (10**9, 4_096, 10**7)],
)
def test_a_memory_gets_the_widest_window_that_leaves_a_third_for_reading_ahead(
    samples: int, batch_size: int, rows: int
) -> None:
    order = Order.for_memory(rows, samples, batch_size)
    assert (order.canonical_shards, order.window_blocks) == (8, 16)
    assert order.rows_per_step <= order.block_rows <= MAX_BLOCK_ROWS
    assert 0.54 * rows < order.live_rows <= rows * 2 / 3
    assert order.steps_per_epoch * batch_size > 0.999 * samples


@MANY
@given(st.integers(5_000, 10**9), SHARDS, st.integers(16, 600), st.integers(1, 10**8))
def test_an_order_for_a_memory_fits_it_or_is_the_narrowest_possible(
    samples: int, shards: int, step_rows: int, rows: int
) -> None:
    samples = max(samples, 40 * shards * step_rows)
    order = Order.for_memory(rows, samples, shards * step_rows, 5, shards)
    assert order.block_rows >= step_rows
    if rows >= samples:
        assert order == Order.create(samples, shards * step_rows, 5, shards)
    elif order.live_rows > rows * 2 / 3:
        assert order.window_blocks == 1
        with pytest.raises(ValueError, match="more than a block"):
            Order.create(samples, shards * step_rows, 5, shards, order.blocks_per_shard + 1, 1)
    else:
        assert order.window_blocks <= 2 * shards


def test_a_narrower_window_is_taken_where_blocks_would_be_shorter_than_a_step() -> None:
    order = Order.for_memory(30_000, 10**6, 2_048)
    assert order.rows_per_step == 256
    assert (order.window_blocks, order.block_rows) == (7, 270)
    assert order.live_rows <= 20_000
