"""Classes are matched by name; the bands are thirds of the classes, by training frequency."""

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import t

from thermopile.trainer.evaluation.bands import band_of_class, estimate, half_widths, match_classes, score


def column(*names):
    return pa.chunked_array([pa.array(names, pa.string())])


@pytest.mark.parametrize(
    ("sizes", "bands"),
    [([5, 500, 50], [2, 0, 1]), ([1, 2, 3, 4, 5, 6], [2, 2, 1, 1, 0, 0]), ([9, 8, 7, 6, 5], [0, 0, 1, 1, 2]),
     ([7, 7, 7], [0, 1, 2]), ([4, 9], [1, 0]), ([3], [0]), ([], [])],
)  # fmt: skip
def test_the_classes_are_cut_into_thirds_the_largest_first(sizes, bands):
    assert band_of_class(np.array(sizes, np.int64)).tolist() == bands


def test_classes_have_the_same_code_in_both_sets():
    classes = match_classes(column("cat", "ant", "cat", None), column("ant", None, "cat"))
    assert classes.names == ["ant", "cat"]
    assert classes.train.tolist() == [1, 0, 1, -1]
    assert classes.test.tolist() == [0, -1, 1]
    assert classes.sizes.tolist() == [1, 2]
    assert classes.test_bands.tolist() == [1, -1, 0]


def test_a_test_class_that_training_lacks_counts_as_none():
    classes = match_classes(column("cat", "ant"), column("cat", "emu", None, "emu", "boa"))
    assert classes.test.tolist() == [1, -1, -1, -1, -1]
    assert classes.unknown == {"boa": 1, "emu": 2}


def test_a_training_set_without_classes_leaves_the_test_samples_without_a_class():
    classes = match_classes(column(None, None), column("cat", "ant", "cat"))
    assert classes.names == []
    assert classes.test_bands.tolist() == [-1, -1, -1]


def test_the_score_counts_samples_without_a_band_only_among_all():
    right = np.array([True, False, True, True])
    assert score(right, np.array([0, 0, 2, -1])) == {"all": 0.75, "head": 0.5, "medium": None, "tail": 1.0}


def test_the_interval_of_several_draws_is_that_of_draws_and_samples_and_missing_for_one_sample():
    right = np.random.default_rng(0).random((3, 40)) < 0.6
    bands = np.repeat([0, 1, 2], [20, 19, 1])
    found = half_widths(right, bands)
    assert found["all"] == estimate(right.astype(np.float64), np.arange(40))["half_width"]
    assert found["medium"] == estimate(right[:, 20:39].astype(np.float64), np.arange(19))["half_width"]
    assert found["tail"] is None
    same = np.repeat(right[:1], 3, axis=0)  # draws that do not differ: Student's interval of the samples alone
    error = same[0].std(ddof=1) / np.sqrt(40)
    assert half_widths(same, bands)["all"] == pytest.approx(t.ppf(0.975, 39) * error)
