"""What coming windows need: in their order, each block once, and again only if it was dropped before its use."""

import numpy as np

from thermopile.pipeline.order.order import Order, Window
from thermopile.pipeline.remote.schedule import NEVER, Schedule
from thermopile.trainer.run.build import windows_from


def window(first_step, last_step, *blocks):
    return Window(first_step, last_step, np.array(blocks))


def taken(schedule):
    return [due.block for due in iter(schedule.take, None)]


def test_blocks_come_in_the_order_of_their_windows():
    assert taken(Schedule([window(1, 4, 2, 5), window(3, 6, 0), window(7, 9, 5)], ahead=2)) == [2, 5, 0, 5]


def test_windows_that_are_over_are_left_out():
    schedule = Schedule([window(1, 4, 2), window(3, 6, 0)], ahead=1)
    schedule.finished(4)
    assert taken(schedule) == [0]


def test_windows_are_read_only_as_far_ahead_as_asked():
    read = []
    endless = (read.append(step) or window(step, step, step) for step in range(1, 1_000_000_000))
    schedule = Schedule(endless, ahead=3)
    assert schedule.take().block == 1
    assert len(read) <= 3


def test_the_next_use_is_the_current_window_until_that_is_over():
    schedule = Schedule([window(1, 4, 7), window(9, 12, 7)], ahead=8)
    schedule.take()
    assert schedule.next_use(7) == 1
    schedule.finished(4)
    assert schedule.next_use(7) == 9
    schedule.finished(12)
    assert schedule.next_use(7) == NEVER
    assert schedule.next_use(3) == NEVER


def test_a_block_dropped_before_its_window_is_taken_again_before_later_ones():
    schedule = Schedule([window(3, 6, 0), window(4, 8, 1), window(9, 11, 2)], ahead=8)
    assert [schedule.take().block, schedule.take().block] == [0, 1]
    schedule.dropped(1)
    schedule.dropped(0)
    assert taken(schedule) == [0, 1, 2]


def test_a_block_that_was_not_taken_yet_is_taken_once_however_often_it_is_dropped():
    schedule = Schedule([window(1, 2, 0), window(5, 6, 0)], ahead=8)
    schedule.take()
    schedule.finished(2)
    schedule.dropped(0)
    assert taken(schedule) == [0]


def test_an_orders_blocks_are_each_taken_once_an_epoch():
    order = Order.for_memory(1000, 5000, 64)
    schedule = Schedule(order.windows(0), ahead=1000)
    reached = [block for each in order.windows(0) for block in each.blocks.tolist()]
    assert taken(schedule) == reached
    assert len(set(reached)) == len(reached)


def test_windows_more_than_an_epoch_ahead_are_not_taken_yet():
    schedule = Schedule([window(101, 104, 2), window(111, 114, 5), window(120, 124, 6)], ahead=3, max_steps=10)
    assert taken(schedule) == [2]
    assert not schedule.has_ended()
    schedule.finished(101)
    assert taken(schedule) == [5]
    schedule.finished(110)
    assert taken(schedule) == [6]
    assert schedule.has_ended()


def test_no_more_than_three_epochs_are_remembered_though_nothing_is_dropped():
    order = Order.for_memory(1000, 5000, 64)
    steps, blocks = order.steps_per_epoch, order.canonical_shards * order.blocks_per_shard
    schedule = Schedule(windows_from(0, order, epochs=20), blocks, steps)
    for step in range(1, 20 * steps + 1):
        taken(schedule)
        schedule.finished(step)
        assert len(schedule._taken) <= 3 * blocks
        assert sum(map(len, schedule._uses.values())) <= 3 * blocks
