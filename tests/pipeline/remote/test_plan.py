"""Which requests fetch which samples: neighbours together, and nothing twice."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from thermopile.pipeline.remote.plan import grouped, pages_of_rows, requests


def spans(*lengths_and_gaps):
    """Ascending spans of these lengths, each with the gap before it."""
    ends = np.cumsum([gap + length for gap, length in lengths_and_gaps])
    return ends - np.array([length for _, length in lengths_and_gaps]), ends


def test_neighbours_within_the_gap_are_one_request():
    starts, stops = spans((100, 10), (0, 10), (5, 10), (6, 10))
    assert requests(starts, stops, max_gap=5, max_bytes=1000) == [(100, 135, 0, 3), (141, 151, 3, 4)]


def test_a_request_holds_whole_samples_and_at_most_the_bytes_allowed_or_one_sample():
    starts, stops = spans((0, 60), (0, 60), (0, 300), (0, 10))
    assert requests(starts, stops, max_gap=0, max_bytes=120) == [(0, 120, 0, 2), (120, 420, 2, 3), (420, 430, 3, 4)]


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 9000)), max_size=30),
    st.integers(0, 9000),
    st.integers(1, 20000),
)  # fmt: skip
def test_requests_bring_each_sample_once_and_nothing_longer_than_a_gap_besides(pieces, max_gap, max_bytes):
    starts, stops = spans(*pieces) if pieces else (np.zeros(0, np.int64), np.zeros(0, np.int64))
    found = requests(starts, stops, max_gap=max_gap, max_bytes=max_bytes)
    assert [place for each in found for place in range(each.first, each.last)] == list(range(len(pieces)))
    for each in found:
        assert (each.start, each.stop) == (starts[each.first], stops[each.last - 1])
        assert (starts[each.first + 1 : each.last] - stops[each.first : each.last - 1] <= max_gap).all()
        assert each.stop - each.start <= max_bytes or each.last == each.first + 1


def test_overlapping_samples_of_a_hostile_file_are_fetched_one_by_one():
    found = requests(np.array([500, 0, 100]), np.array([600, 200, 300]), max_gap=0, max_bytes=1000)
    assert found == [(500, 600, 0, 1), (0, 200, 1, 2), (100, 300, 2, 3)]


def test_records_are_in_the_pages_of_their_rows_and_the_header_in_the_first():
    assert pages_of_rows(np.array([62, 63, 64])).tolist() == [0, 1]
    assert pages_of_rows(np.array([1000])).tolist() == [0, 15]


@given(st.lists(st.integers(-3, 3)))
def test_groups_are_the_places_of_each_number(numbers):
    expected = {
        number: [place for place, each in enumerate(numbers) if each == number] for number in sorted({*numbers})
    }
    found = {number: places.tolist() for number, places in grouped(np.array(numbers, np.int64))}
    assert list(found.items()) == list(expected.items())
