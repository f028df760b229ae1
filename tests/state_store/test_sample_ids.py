import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thermopile.state_store.errors import DuplicateIdError, SampleIdError
from thermopile.state_store.transfer import checked_ids, sorted_without_repeats

ids_below_50 = st.lists(st.integers(0, 49)).map(lambda ids: np.array(ids, dtype=np.int64))


def test_ids_come_as_numpy_arrays_or_cpu_tensors():
    for ids in (np.array([3, 0, 9]), torch.tensor([3, 0, 9])):
        assert checked_ids(ids, range(10)).tolist() == [3, 0, 9]


def test_checked_ids_are_a_copy_that_outlives_the_callers_buffer():
    buffer = torch.tensor([1, 2])
    ids = checked_ids(buffer, range(10))
    buffer.zero_()
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize("outside", [-1, 10, 2**40])
def test_an_id_out_of_range_is_named_beside_the_number_of_samples(outside):
    with pytest.raises(SampleIdError, match=f"sample id {outside} is outside 0 … 9: the store holds 10 samples"):
        checked_ids(np.array([0, outside, 3]), range(10))


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.float64, bool])
def test_ids_of_another_dtype_are_refused(dtype):
    with pytest.raises(SampleIdError, match=f"{np.dtype(dtype)} of shape"):
        checked_ids(np.zeros(3, dtype=dtype), range(10))


def test_ids_of_two_dimensions_are_refused():
    with pytest.raises(SampleIdError, match=r"int64 of shape \(2, 2\)"):
        checked_ids(np.zeros((2, 2), dtype=np.int64), range(10))


@pytest.mark.gpu
def test_ids_on_a_gpu_are_refused():
    with pytest.raises(SampleIdError, match="keep them on the CPU"):
        checked_ids(torch.zeros(3, dtype=torch.int64, device="cuda"), range(10))


@given(ids_below_50)
def test_a_repeated_id_is_refused_and_distinct_ones_are_sorted(ids):
    if len(set(ids.tolist())) == len(ids):
        assert sorted_without_repeats(ids).tolist() == sorted(ids.tolist())
    else:
        with pytest.raises(DuplicateIdError):
            sorted_without_repeats(ids)


def test_the_repeated_id_is_named_with_its_places():
    with pytest.raises(DuplicateIdError, match=r"sample id 7 occurs at positions \[0, 2\]"):
        sorted_without_repeats(np.array([7, 3, 7]))
