"""The cache's room: within its limit, what is in use stays, and what is needed last goes first."""

import threading

import numpy as np
import pytest

from thermopile.pipeline.order.order import Window
from thermopile.pipeline.remote.room import CacheTooSmallError, Room
from thermopile.pipeline.remote.schedule import Schedule


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def room(dropped):
    """100 bytes for the blocks 0 to 4, needed at the steps 10, 20, …; 9 is not needed."""
    schedule = Schedule([Window(10 * k + 10, 10 * k + 15, np.array([k])) for k in range(5)], ahead=8)
    for _ in range(5):
        schedule.take()
    return Room(threading.RLock(), 100, dropped.append, schedule)


def test_the_block_needed_last_makes_way(room, dropped):
    for block in (0, 2, 9, 1):
        room.take(block, 25)
    room.take(3, 30)
    assert dropped == [9, 2]
    assert room.bytes == 80


def test_reading_ahead_drops_only_what_is_needed_later(room, dropped):
    for block in (0, 1, 3):
        assert room.take_ahead(block, 33, 10 * block + 10)
    assert not room.take_ahead(4, 33, 50)
    assert room.take_ahead(2, 33, 30)
    assert dropped == [3]


def test_blocks_in_use_stay_and_a_caller_without_room_is_told_how_much_it_takes(room, dropped):
    room.enter([0, 1])
    room.take(0, 50)
    room.take(1, 50)
    with pytest.raises(CacheTooSmallError, match=r"data.cache = 100 is too small.* take 110 bytes. .* at least 123"):
        room.take(2, 10)
    room.leave([0, 1])
    room.take(2, 10)
    assert dropped == [1]


def test_a_caller_waits_for_another_that_can_make_room(room, dropped):
    room.enter([0])
    room.take(0, 100)
    room.enter([1])
    threading.Timer(0.2, room.leave, [[0]]).start()
    room.take(1, 100)
    assert dropped == [0]


def test_samples_whose_reader_was_forgotten_can_be_dropped(room, dropped):
    room.enter([0])
    room.take(0, 100)
    room.leave_later((0,))
    room.take(1, 100)
    assert dropped == [0]


def test_a_whole_block_takes_what_it_takes_on_disk_not_the_sum_of_its_parts(room):
    room.take(0, 60)
    room.take(0, 30)
    assert room.take_ahead(0, 40, 10)
    room.take(0, 30)
    assert room.bytes == 40
    assert room.peak_bytes == 90


def test_a_dropped_block_takes_room_again(room, dropped):
    assert room.take_ahead(4, 40, 50)
    room.take(0, 100)
    assert dropped == [4]
    room.enter([4])
    room.take(4, 30)
    assert room.bytes == 30


def test_a_caller_who_waits_goes_on_when_the_read_ahead_takes_room_for_its_block(room):
    room.enter([0, 1])
    room.take(0, 80)
    room.enter([1], ahead=True)
    waits = threading.Thread(target=room.take, args=[1, 30], daemon=True)
    waits.start()
    assert room.take_ahead(1, 20, 20)
    room.leave([1], ahead=True)
    waits.join(20)
    assert not waits.is_alive()
    assert room.bytes == 100


def test_without_a_schedule_the_block_used_longest_ago_makes_way(dropped):
    room = Room(threading.RLock(), 100, dropped.append)
    for block in (0, 1, 0):
        room.enter([block])
        room.leave([block])
    room.take(0, 50)
    room.take(1, 50)
    room.enter([2])
    room.take(2, 40)
    assert dropped == [1]
    room.enter([0])
    room.take(2, 80)
    assert room.bytes == 170


def test_a_block_that_made_way_before_its_window_is_read_ahead_again(dropped):
    schedule = Schedule([Window(10, 15, np.array([0])), Window(20, 25, np.array([1]))], ahead=8)
    room = Room(threading.RLock(), 100, dropped.append, schedule)
    for due in (schedule.take(), schedule.take()):
        assert room.take_ahead(due.block, 50, due.first_step)
    room.take(7, 50)
    assert dropped == [1]
    assert schedule.take().block == 1
