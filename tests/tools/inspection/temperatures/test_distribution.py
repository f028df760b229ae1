import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermopile.tools.inspection.temperatures import distribution as module
from thermopile.tools.inspection.temperatures.distribution import MANTISSA_BITS, Distribution, Smallest

NUMBERS = st.floats(-(2.0**40), 2.0**40, width=32)


def distribution_of(values, *, pieces=1):
    distribution = Distribution()
    for piece in np.array_split(np.array(values, np.float32), pieces):
        distribution.add(piece)
    return distribution


@given(st.lists(NUMBERS, min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_a_value_that_was_counted_to_the_relative_precision(values, share):
    values = np.array(values, np.float32)
    exact = float(np.quantile(values, share, method="lower"))
    found = distribution_of(values).quantile(share)
    # numpy's own rounding may fall to a neighbour of a place that lies between two values.
    neighbours = np.sort(values)[max(0, int(share * (len(values) - 1)) - 1) :][:3]
    assert any(abs(found - value) <= 2.0**-MANTISSA_BITS * abs(value) + 1e-38 for value in (exact, *neighbours))


@given(st.lists(NUMBERS, min_size=1, max_size=50), st.integers(1, 7))
def test_values_in_pieces_are_counted_as_in_one(values, pieces):
    whole, parts = distribution_of(values), distribution_of(values, pieces=pieces)
    assert (whole.count, whole.min, whole.max) == (parts.count, parts.min, parts.max)
    assert whole.mean == pytest.approx(parts.mean)
    np.testing.assert_array_equal(whole.ranks(np.float32(values)), parts.ranks(np.float32(values)))


@given(st.lists(st.integers(0, 4096), min_size=1, max_size=50), st.floats(0, 1))
def test_whole_numbers_up_to_4096_have_a_bin_each(values, share):
    assert distribution_of(values).quantile(share) in values


def test_the_lowest_and_the_highest_value_are_exact():
    distribution = distribution_of([0.123456, 7.654321])
    assert distribution.quantile(0) == pytest.approx(np.float32(0.123456), abs=0)
    assert distribution.quantile(1) <= distribution.max == pytest.approx(np.float32(7.654321), abs=0)


def test_values_that_are_not_finite_are_counted_apart():
    distribution = distribution_of([np.nan, np.inf, -np.inf, 2.0])
    assert (distribution.not_finite, distribution.count, distribution.mean) == (3, 1, 2.0)


def test_both_zeros_are_one():
    assert distribution_of([-0.0, 0.0]).ranks(np.float32([0.0, -0.0])).tolist() == [0.5, 0.5]


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=40))
def test_a_rank_is_the_share_below_and_half_the_share_of_equals(values):
    ranks = distribution_of(values).ranks(np.array(values, np.float32))
    for value, rank in zip(values, ranks, strict=True):
        below, equal = sum(v < value for v in values), values.count(value)
        assert rank == pytest.approx((below + equal / 2) / len(values))


def test_shares_at_a_bound_hold_the_bound_itself():
    distribution = distribution_of([0.005, 0.005, 0.5, 1.0])
    assert (distribution.share_at_most(0.005), 1 - distribution.share_below(1.0)) == (0.5, 0.25)
    assert (distribution.share_at_most(0.004), 1 - distribution.share_below(2.0)) == (0.0, 0.0)


@given(st.lists(NUMBERS, min_size=1, max_size=60))
def test_no_value_is_lost_between_the_edges_of_its_own_histogram(values):
    distribution = distribution_of(values)
    edges = distribution.edges(60)
    assert 2 <= len(edges) <= 61
    assert distribution.histogram(edges).sum() == len(values)


def test_a_histogram_is_not_finer_than_what_was_counted():
    close = np.linspace(1, 1.01, 1000)
    counts = distribution_of(close).histogram(distribution_of(close).edges(60))
    assert len(counts) < 5
    assert counts.min() > 0


def test_trimmed_edges_leave_stragglers_out_and_the_outermost_bars_hold_them():
    distribution = distribution_of([*np.linspace(1, 2, 998), -1000, 1000])
    edges = distribution.edges(10, trimmed=0.005)
    assert 0.9 < edges[0] < edges[-1] < 2.1
    counts = distribution.histogram(edges)
    assert counts.sum() == 1000
    assert counts.max() < 110


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=40))
def test_the_share_below_counts_no_equals(values):
    distribution = distribution_of(values)
    for value in values:
        assert distribution.share_below(value) == pytest.approx(sum(v < value for v in values) / len(values))


def test_the_bin_of_a_quantile_holds_values_equal_to_the_precision():
    begin, end = distribution_of([1.0] * 99 + [2.0]).bin_of(0.5)
    assert (begin, end) == (1.0, 1 + 2.0**-MANTISSA_BITS)


TIED = st.tuples(st.integers(0, 2), st.one_of(st.integers(-3, 3), st.just(float("nan"))))


@given(st.lists(TIED, max_size=60), st.integers(0, 8), st.integers(1, 9), st.booleans())
def test_the_smallest_are_those_of_a_sort_by_key_breaker_and_id_however_they_come(rows, count, pieces, has_breakers):
    keys, breakers = (np.array(column, np.float32) for column in (zip(*rows, strict=True) if rows else ((), ())))
    smallest = Smallest(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MIN_PENDING", 3)
        for places in np.array_split(np.arange(len(rows)), pieces):
            smallest.add(places, keys[places], *([breakers[places]] if has_breakers else []))
    breakers = np.nan_to_num(breakers, nan=np.inf) if has_breakers else np.zeros(len(rows))
    order = sorted(range(len(rows)), key=lambda i: (keys[i], breakers[i], i))
    assert smallest.chosen()[0].tolist() == order[:count]
    assert smallest.chosen()[0].dtype == np.int64
    assert smallest.chosen()[1].tolist() == keys[order[:count]].tolist()


def test_equals_do_not_pile_up():
    """Where nearly all share the lowest key, as at tau_min, only those that can be selected are kept."""
    smallest, kept = Smallest(72), []
    for start in range(0, 1 << 20, 1 << 17):
        ids = np.arange(start, start + (1 << 17))
        smallest.add(ids, np.zeros(len(ids)), np.random.default_rng(start).integers(0, 3, len(ids)))
        kept.append(sum(len(ids) for ids, *_ in smallest._parts))
    assert max(kept) < 1_000
