"""Counter-based randomness: numbers depend on what they are for, and on nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from thermopile.pipeline.rng import fold, mix, uniform

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
