"""The compiled loops over records against numpy, on more records than a tile and on shapes that no square hides."""

import numpy as np
import pytest

from thermopile.state_store.records import aligned_words, gather, scatter, to_columns

FIELDS, ROW_WORDS = 3, 8
SIZES = pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 300])


@pytest.fixture
def words():
    """1,000 records, each of which differs from every other in every word."""
    words = aligned_words(1000, ROW_WORDS)
    words[:] = np.arange(words.size, dtype=np.uint32).reshape(words.shape)
    words.view(np.float32)[:, :FIELDS] = words[:, :FIELDS]
    return words


def places_of(size):
    return np.random.default_rng(size).permutation(1000)[:size]


@SIZES
def test_gather_reads_the_fields_and_visits_of_every_place_in_its_order(words, size):
    places, values, visits = places_of(size), np.empty((FIELDS, size), np.float32), np.empty(size, np.int32)
    gather(words, places, values, visits)
    np.testing.assert_array_equal(values, words.view(np.float32)[places, :FIELDS].T)
    np.testing.assert_array_equal(visits, words[places, FIELDS])


@SIZES
def test_scatter_writes_accepted_records_with_visit_and_step_and_no_other_word(words, size):
    places, expected = places_of(size), words.copy()
    values = np.random.default_rng(1).random((FIELDS, size), dtype=np.float32)
    accepted = np.arange(size) % 3 != 1
    expected.view(np.float32)[places[accepted], :FIELDS] = values.T[accepted]
    expected[places[accepted], FIELDS] += 1
    expected[places[accepted], FIELDS + 1] = 77
    scatter(words, places, values, accepted, np.uint32(77))
    np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("columns", [1, 5, ROW_WORDS])
@SIZES
def test_to_columns_transposes_the_first_words_of_every_record(words, size, columns):
    memory = np.zeros((ROW_WORDS + 1, 400), np.uint32)  # beyond the part that is to be written: nothing else may be
    to_columns(words[:size], memory[:columns, :size])
    np.testing.assert_array_equal(memory[:columns, :size], words[:size, :columns].T)
    assert np.count_nonzero(memory) == np.count_nonzero(words[:size, :columns])
