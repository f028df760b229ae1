import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermopile.tools.inspection.temperatures import distribution as module
from thermopile.tools.inspection.temperatures.distribution import Smallest


@pytest.fixture(autouse=True)
def early_compaction(monkeypatch):
    monkeypatch.setattr(module, "_MIN_PENDING", 4)


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(0, 8), st.integers(1, 9))
def test_the_smallest_keys_are_kept_and_of_equals_the_lowest_ids(keys, count, pieces):
    smallest = Smallest(count)
    ids, values = np.arange(len(keys)) * 3, np.array(keys, np.float32)
    for piece in np.array_split(np.arange(len(keys)), pieces):
        smallest.add(ids[piece], values[piece])
    expected = sorted(zip(keys, ids.tolist(), strict=True))[:count]
    found, their_keys = smallest.chosen()
    assert list(zip(their_keys.tolist(), found.tolist(), strict=True)) == expected
    assert found.dtype == np.int64
