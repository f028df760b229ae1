"""The keyed shuffle of the smallest domains, which the literal ids in test_order.py do not reach."""

import numpy as np
import pytest

from thermopile.pipeline.order.bijection import shuffled, unshuffled


@pytest.mark.parametrize(
    ("size", "of_keys"),
    [
        (2, [[1, 0], [0, 1], [0, 1], [1, 0], [1, 0], [0, 1], [1, 0], [1, 0]]),
        (3, [[0, 1, 2], [1, 0, 2], [0, 2, 1], [2, 1, 0]]),
        (5, [[2, 0, 4, 1, 3], [4, 1, 3, 2, 0]]),
        (9, [[2, 5, 8, 4, 1, 3, 0, 6, 7], [1, 4, 6, 2, 5, 8, 0, 7, 3]]),
    ],
)
def test_the_shuffle_of_a_tiny_domain_never_changes(size: int, of_keys: list[list[int]]) -> None:
    """A resumed run relies on it, as on the ids in test_order.py."""
    assert [[shuffled(p, size, np.uint64(key)) for p in range(size)] for key in range(len(of_keys))] == of_keys


@pytest.mark.parametrize("size", [1, 2, 3, 9, 255, 256, 257, 1_000])
def test_the_shuffle_can_be_undone(size: int) -> None:
    for key in (np.uint64(0), np.uint64(2**64 - 1)):
        assert [unshuffled(shuffled(place, size, key), size, key) for place in range(size)] == list(range(size))
