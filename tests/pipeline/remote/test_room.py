"""The cache's room: within its limit, what is in use stays, and what is needed last goes first."""

import threading

import numpy as np
import pytest

from thermopile.pipeline.order.order import Window
from thermopile.pipeline.remote.plan import PAGE
from thermopile.pipeline.remote.room import CacheTooSmallError, Room
from thermopile.pipeline.remote.schedule import Schedule


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def room(dropped):
    """100 pages for the blocks 0 to 4, needed at the steps 10, 20, …; 9 is not needed."""
    schedule = Schedule([Window(10 * k + 10, 10 * k + 15, np.array([k])) for k in range(5)], ahead=8)
    for _ in range(5):
        schedule.take()
    return Room(threading.RLock(), 100 * PAGE, dropped.append, schedule)


def test_the_block_needed_last_makes_way(room, dropped):
    for block in (0, 2, 9, 1):
        room.take(block, 25 * PAGE)
    room.take(3, 30 * PAGE)
    assert dropped == [9, 2]
    assert room.bytes == 80 * PAGE


def test_reading_ahead_drops_only_what_is_needed_later(room, dropped):
    for block in (0, 1, 3):
        assert room.take_ahead(block, 33 * PAGE, 10 * block + 10)
    assert not room.take_ahead(4, 33 * PAGE, 50)
    assert room.take_ahead(2, 33 * PAGE, 30)
    assert dropped == [3]


def test_blocks_in_use_stay_and_a_caller_without_room_is_told_how_much_it_takes(room, dropped):
    room.enter([0, 1])
    room.take(0, 50 * PAGE)
    room.take(1, 50 * PAGE)
    with pytest.raises(
        CacheTooSmallError, match=r"data.cache = 409,600 is too small.* take 450,560 bytes. .* at least 506,880"
    ):
        room.take(2, 10 * PAGE)
    room.leave([0, 1])
    room.take(2, 10 * PAGE)
    assert dropped == [1]


def test_a_caller_waits_for_another_that_can_make_room(room, dropped):
    room.enter([0])
    room.take(0, 100 * PAGE)
    room.enter([1])
    threading.Timer(0.2, room.leave, [[0]]).start()
    room.take(1, 100 * PAGE)
    assert dropped == [0]


def test_samples_whose_reader_was_forgotten_can_be_dropped(room, dropped):
    room.enter([0])
    room.take(0, 100 * PAGE)
    room.leave_later((0,))
    room.take(1, 100 * PAGE)
    assert dropped == [0]


def test_a_block_takes_whole_pages_of_one_file_and_no_more_than_was_paid_for_it(room):
    assert room.take(0, 10 * PAGE + 1) == 0
    assert room.bytes == 11 * PAGE
    assert room.take_ahead(0, 40 * PAGE, 10)
    assert room.take(0, 30 * PAGE - 1) == 10 * PAGE + 1
    assert room.bytes == 40 * PAGE
    assert room.take(0, 1) == 40 * PAGE
    assert room.bytes == 41 * PAGE


def test_a_dropped_block_takes_room_again(room, dropped):
    assert room.take_ahead(4, 40 * PAGE, 50)
    room.take(0, 100 * PAGE)
    assert dropped == [4]
    room.enter([4])
    room.take(4, 30 * PAGE)
    assert room.bytes == 30 * PAGE


def test_a_caller_who_waits_goes_on_when_the_read_ahead_takes_room_for_its_block(room, dropped):
    room.enter([4])
    room.take(4, 80 * PAGE)
    room.enter([1])
    waits = threading.Thread(target=room.take, args=[1, 30 * PAGE], daemon=True)
    waits.start()
    with room.changed:
        room.leave([4])
        assert room.take_ahead(1, 30 * PAGE, 20)
    waits.join(20)
    assert not waits.is_alive()
    assert dropped == [4]
    assert room.bytes == 30 * PAGE


def test_without_a_schedule_the_block_used_longest_ago_makes_way(dropped):
    room = Room(threading.RLock(), 100 * PAGE, dropped.append)
    for block in (0, 1, 0):
        room.enter([block])
        room.leave([block])
    room.take(0, 50 * PAGE)
    room.take(1, 50 * PAGE)
    room.enter([2])
    room.take(2, 40 * PAGE)
    assert dropped == [1]
    room.enter([0])
    room.take(2, 80 * PAGE)
    assert room.bytes == 170 * PAGE


def test_a_block_that_made_way_before_its_window_is_read_ahead_again(dropped):
    schedule = Schedule([Window(10, 15, np.array([0])), Window(20, 25, np.array([1]))], ahead=8)
    room = Room(threading.RLock(), 100 * PAGE, dropped.append, schedule)
    for due in (schedule.take(), schedule.take()):
        assert room.take_ahead(due.block, 50 * PAGE, due.first_step)
    room.take(7, 50 * PAGE)
    assert dropped == [1]
    assert schedule.take().block == 1
