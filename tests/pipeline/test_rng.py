"""Counter-based randomness: numbers depend on what they are for, and on nothing else."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from thermopile.pipeline.rng import fold, mix, nearly_normal, uniform

uint64 = st.integers(0, 2**64 - 1).map(np.uint64)


def test_mix_is_the_published_splitmix64():
    # The first outputs of SplitMix64 from state 0: mix of the golden ratio's multiples.
    golden = 0x9E3779B97F4A7C15
    states = [np.uint64(golden * k % 2**64) for k in (1, 2, 3)]
    assert [int(mix(state)) for state in states] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(uint64, uint64, uint64)
def test_fold_gives_different_values_different_keys(key, one, other):
    assert (fold(key, one) == fold(key, other)) == (one == other)


@given(uint64, uint64)
def test_uniform_stays_in_the_half_open_unit_interval(key, draw):
    assert 0 <= uniform(key, draw) < 1


def test_draws_of_a_key_and_first_draws_of_neighbouring_keys_are_uniform():
    draws = [uniform(np.uint64(7), np.uint64(k)) for k in range(5000)]
    firsts = [uniform(np.uint64(k), np.uint64(0)) for k in range(5000)]
    assert kstest(draws, "uniform").pvalue > 0.01
    assert kstest(firsts, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(draws, firsts)[0, 1]) < 0.05


def test_a_nearly_normal_number_is_the_sum_of_the_four_parts_of_a_step_of_splitmix64():
    deviation = math.sqrt(4 * (2**32 - 1) / 12)
    wanted = (0xE220 + 0xA839 + 0x7B1D + 0xCDAF - 2 * 65535) / deviation
    assert nearly_normal(np.uint64(0), np.uint64(1)) == pytest.approx(wanted, rel=1e-15)


def test_nearly_normal_numbers_are_so_in_a_stream_and_over_keys_and_unrelated():
    stream, over_keys = (
        np.array([nearly_normal(np.uint64(key), np.uint64(i)) for key, i in pairs])
        for pairs in ([(7, i) for i in range(20_000)], [(key, 3) for key in range(20_000)])
    )
    for numbers in (stream, over_keys):
        assert abs(numbers.mean()) < 0.03
        assert abs(numbers.std() - 1) < 0.02
        assert abs((numbers**4).mean() - 2.7) < 0.15  # a normal number has 3
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(stream, over_keys)[0, 1]) < 0.03
