import pytest

from thermopile.tools.bench.measuring import NoRoomError, check_room
from thermopile.tools.bench.state.sizes import FULL


def test_a_machine_with_room_is_accepted():
    for sizes in FULL.values():
        check_room(sizes, memory=20 * 10**9, disk=20 * 10**9, cure="")


def test_too_little_memory_is_told_with_what_is_needed_and_what_is_left():
    with pytest.raises(NoRoomError, match=r"needs 10\.6 GB of memory, but 8\.0 GB are free; lower --samples$"):
        check_room(FULL["rows"], memory=8 * 10**9, disk=10**12, cure="lower --samples")


def test_too_little_disk_is_told_with_the_option_that_helps():
    with pytest.raises(NoRoomError, match=r"needs 6\.5 GB of disk, but 2\.0 GB are free; .* or choose another --dir"):
        check_room(FULL["windowed"], memory=10**11, disk=2 * 10**9, cure="lower --samples")
