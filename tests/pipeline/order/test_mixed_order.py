"""The order of a mixture: batches in shares, every part's passes, rows of state, windows."""

import numpy as np
import pytest

from thermopile.pipeline.order.mixed_order import MixedOrder
from thermopile.pipeline.order.order import Order, Served

FULL = MixedOrder.of(Order.create(4_900, 1_024, seed=3), [3_400, 900, 600], [5, 2, 1])
WINDOWED = MixedOrder.of(Order.create(40_000, 1_024, 3, 8, 20, 6), [26_000, 11_000, 3_000], [5, 2, 1])
ORDERS = pytest.mark.parametrize("order", [FULL, WINDOWED], ids=["full", "windowed"])


def ids_of(order, *place):
    return order.rows.ids_at(order.batch_ids(*place))


def steps(order, epochs):
    return [(epoch, step) for epoch in range(epochs) for step in range(order.steps_per_epoch)]


@ORDERS
@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_rank_has_its_share_of_every_part_and_the_ranks_together_the_batch(order, world):
    first = order.rows.first_id
    for place in steps(order, 2):
        ranks = [ids_of(order, *place, rank, world) for rank in range(world)]
        for ids in ranks:
            part = np.searchsorted(first, ids, "right") - 1
            np.testing.assert_array_equal(part, np.repeat([0, 1, 2], np.array([640, 256, 128]) // world))
        assert len(set(np.concatenate(ranks).tolist())) == 1_024
        assert set(np.concatenate(ranks)) == set(ids_of(order, *place))


@ORDERS
def test_every_part_makes_its_own_passes_one_after_another_across_epochs(order):
    served = np.stack([ids_of(order, *place) for place in steps(order, 5)])
    for part, first, columns in zip(order.parts, order.rows.first_id, np.split(served, [640, 896], 1), strict=False):
        for turn in range(len(served) // part.steps_per_epoch):
            ids = columns[turn * part.steps_per_epoch :][: part.steps_per_epoch].ravel()
            assert len(set(ids.tolist())) == len(ids)
            own = np.concatenate([part.batch_ids(turn, step) for step in range(part.steps_per_epoch)])
            np.testing.assert_array_equal(ids, first + own)
    assert order.steps_per_epoch == max(part.steps_per_epoch for part in order.parts)
    assert len({part.steps_per_epoch for part in order.parts}) > 1


def test_parts_of_equal_length_do_not_pair_up_their_samples():
    twins = MixedOrder.of(Order.create(800, 64, canonical_shards=2), [400, 400], [1, 1])
    one, two = np.split(ids_of(twins, 0, 0), 2)
    assert set(one) != set(two - 400)


@ORDERS
def test_views_are_drawn_by_the_step_because_a_part_may_meet_a_sample_twice_in_an_epoch(order):
    drawn = [order.draw(*place) for place in steps(order, 3)]
    assert len(set(drawn)) == len(drawn)
    pieces = Served(order, None, order.samples, pieces=4)
    assert [pieces.draw(1, step) for step in (0, 3, 4)] == [order.draw(1, 0), order.draw(1, 0), order.draw(1, 1)]


@ORDERS
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_sample_has_a_row_of_its_own_among_those_of_its_rank(order, world):
    ids = np.arange(order.samples)
    rows = order.rows.positions(ids)
    assert len(set(rows.tolist())) == len(ids)
    np.testing.assert_array_equal(order.rows.ids_at(rows), ids)
    owned = [order.rank_ids(rank, world) for rank in range(world)]
    assert owned[0].start == 0
    assert owned[-1].stop == order.rows.about.kept
    assert all(each.start % order.block_rows == each.stop % order.block_rows == 0 for each in owned)
    for place in steps(order, 2):
        for rank in range(world):
            at = order.batch_ids(*place, rank, world)
            assert owned[rank].start <= at.min() <= at.max() < owned[rank].stop


@ORDERS
@pytest.mark.parametrize("world", [1, 2])
def test_windows_hold_every_row_of_their_steps_and_no_more_than_the_bound(order, world):
    for rank in range(world):
        for epoch in range(3):
            told = list(order.windows(epoch, rank, world))
            assert [window.first_step for window in told] == sorted(window.first_step for window in told)
            assert all(0 <= each.first_step <= each.last_step < order.steps_per_epoch for each in told)
            for step in range(order.steps_per_epoch):
                live = [window.blocks for window in told if window.first_step <= step <= window.last_step]
                live = np.unique(np.concatenate(live))
                used = order.batch_ids(epoch, step, rank, world) // order.block_rows
                assert np.isin(used, live).all()
                assert len(live) * order.block_rows <= order.live_rows
    assert (order.live_rows < order.rows.about.kept) == (order is WINDOWED)


def test_a_parts_windows_stay_within_what_an_order_may_have():
    order = Order.for_memory(452_645, 1_039_173 + 34_468, 768, 0, 8)
    mixed = MixedOrder.of(order, [1_039_173, 34_468], [2, 1])
    assert all(part.window_blocks <= 2 * part.canonical_shards for part in mixed.parts)


def test_without_windows_few_rows_are_unused():
    assert FULL.rows.about.kept < 4_900 * 1.3


def test_a_part_that_is_too_small_is_named():
    with pytest.raises(ValueError, match=r"part 2 of the mixture: 100 samples leave"):
        MixedOrder.of(Order.create(4_100, 1_024), [4_000, 100], [3, 1])
