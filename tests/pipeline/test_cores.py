"""Processes that share a machine share its cores, whether a scheduler binds each to its own or not."""

import pytest

from thermopile.pipeline.cores import divided_cores

TWELVE = range(12)


@pytest.mark.parametrize(
    ("masks", "cores"),
    [
        pytest.param([TWELVE] * 4, [3] * 4, id="not bound"),
        pytest.param([range(first, first + 3) for first in (0, 3, 6, 9)], [3] * 4, id="each bound to its own"),
        pytest.param([range(6), range(6), range(6, 12), range(6, 12)], [3] * 4, id="bound in pairs"),
        pytest.param([TWELVE] * 8, [2] * 4 + [1] * 4, id="a number that does not divide the cores"),
        pytest.param([{0, 2}, {0, 2}, {1, 3}, {1, 3}], [1] * 4, id="bound to every second core"),
    ],
)
def test_all_cores_of_each_host_are_used_once(masks, cores):
    processes = [(host, mask) for host in ("a", "b") for mask in masks]
    assert divided_cores(processes) == cores * 2
    assert sum(cores) == len({core for mask in masks for core in mask})


def test_more_processes_than_cores_have_one_each():
    assert divided_cores([("a", {0})] * 3) == [1, 1, 1]
