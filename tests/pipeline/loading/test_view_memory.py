"""Memory of views is used again, and never while anyone can still see it."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thermopile.pipeline.loading.ffcv_loader import ViewMemory

SHAPE = (2, 3, 4)

REFERRING = {
    "itself": lambda lent: lent,
    "a view": lambda lent: lent[1, ::2],
    "a tensor": torch.from_numpy,
    "a slice of a tensor": lambda lent: torch.from_numpy(lent)[0, :, 1],
    "a tensor's storage": lambda lent: torch.from_numpy(lent).untyped_storage(),
    "numpy of a tensor": lambda lent: torch.from_numpy(lent).view(-1).numpy(),
    "a tuple of views": lambda lent: tuple(torch.from_numpy(lent)),
}


def address(lent):
    return lent.__array_interface__["data"][0]


@pytest.mark.parametrize("refer", REFERRING.values(), ids=REFERRING)
def test_memory_is_lent_again_only_when_nothing_refers_to_it(refer):
    memory = ViewMemory(spare=1)
    lent = memory.lend(SHAPE)
    first = address(lent)
    kept = refer(lent)
    del lent
    other = memory.lend(SHAPE)
    assert address(other) != first
    del kept
    assert address(memory.lend(SHAPE)) == first


def test_another_shape_of_the_same_size_fits_and_another_size_does_not():
    memory = ViewMemory(spare=1)
    first = address(memory.lend((2, 6)))
    again = memory.lend((4, 3))
    assert address(again) == first
    assert again.shape == (4, 3)
    del again
    assert memory.lend((5, 3)).shape == (5, 3)


def test_no_more_is_kept_than_asked_for():
    memory = ViewMemory(spare=2)
    lent = [memory.lend(SHAPE) for _ in range(5)]
    owned = [weakref.ref(array.base.base.obj) for array in lent]
    lent.clear()
    gc.collect()
    assert sum(alive() is not None for alive in owned) == 2


@given(st.lists(st.sampled_from(["lend", "drop first", "drop last"]), max_size=30), st.integers(0, 4))
def test_what_is_held_keeps_its_values_whatever_else_is_lent(calls, spare):
    memory, held = ViewMemory(spare), []
    for number, call in enumerate(calls):
        if call == "lend":
            held.append((number, memory.lend(SHAPE)))
            held[-1][1][:] = number
        elif held:
            held.pop(0 if call == "drop first" else -1)
        for value, array in held:
            np.testing.assert_array_equal(array, value)
