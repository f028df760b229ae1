"""Which ranges hold which samples: neighbours together, nothing twice, and no page lost that another sample uses."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from thermopile.pipeline.dataset.row_records import PAGE_BYTES, RECORD
from thermopile.pipeline.remote.plan import PAGE, on_disk, pages_of, pages_of_rows, requests, spans_of


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


def test_a_sample_reaches_from_its_picture_to_the_last_of_its_tokens():
    records = np.zeros(2, RECORD)
    records["jpeg_at"], records["jpeg_bytes"] = [1000, 5000], [100, 100]
    records["tokens_at"], records["captions"] = [1100, 4800], [3, 1]
    starts, stops, possible = spans_of(records, np.full(2, -1), 128)
    assert (starts.tolist(), stops.tolist(), possible) == ([1000, 4800], [1484, 5100], 2)


def test_of_a_sample_whose_picture_is_in_a_tar_only_the_tokens_are_in_the_shard():
    records = np.zeros(1, RECORD)
    records["jpeg_at"], records["jpeg_bytes"], records["tokens_at"], records["captions"] = 1 << 40, 100, 700, 2
    assert [each.tolist() for each in spans_of(records, np.array([3]), 128)[:2]] == [[700], [956]]
    records["captions"] = 0
    starts, stops, _ = spans_of(records, np.array([3]), 0)
    assert (starts == stops).all()


def test_a_record_whose_tokens_are_far_from_its_picture_is_impossible():
    records = np.zeros(2, RECORD)
    records["jpeg_bytes"], records["captions"], records["tokens_at"] = 100, 1, [100, 2 * PAGE_BYTES]
    assert spans_of(records, np.full(2, -1), 128)[2] == 1


def test_records_are_in_the_pages_of_their_rows_and_the_header_in_the_first():
    assert pages_of_rows(np.array([62, 63, 64])).tolist() == [0, 1]
    assert pages_of_rows(np.array([1000])).tolist() == [0, 15]


def test_the_pages_of_spans_are_all_that_they_touch():
    assert pages_of(np.array([10, PAGE - 1, 7]), np.array([20, 2 * PAGE + 1, 7])).tolist() == [0, 0, 1, 2]
    assert pages_of(np.array([-PAGE]), np.array([1])).tolist() == [-1, 0]


def test_a_page_that_several_spans_share_takes_its_disk_once():
    assert on_disk(np.array([10, 30, PAGE - 1]), np.array([20, 40, PAGE + 1])) == 2 * PAGE
