import zlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from thermopile.tools.inspection import read_run
from thermopile.tools.temperatures import (
    PERMUTATIONS,
    Side,
    correlate,
    mean_by_class,
    measure,
    summarise,
    summarise_classes,
)

EVERYBODY = np.ones(6, bool)


def side_of(tau, name="first"):
    tau = np.array(tau, np.float32)
    return Side(name, "image", tau, summarise(tau, None, None))


def test_a_side_is_summarised_by_mean_extremes_and_quantiles():
    tau = np.linspace(0.1, 0.3, 101, dtype=np.float32)
    summary = summarise(tau, None, None)
    expected = [0.2, 0.1, 0.11, 0.2, 0.29, 0.3]
    np.testing.assert_allclose(summary[:6], expected, rtol=1e-6)
    assert (summary.share_at_tau_min, summary.share_at_tau_max) == (None, None)


def test_the_shares_at_the_bounds_count_what_the_state_holds_in_float32():
    tau = np.array([0.1, 0.1, 0.5, 0.7], np.float32)
    # In float32, 0.1 is a little more than the setting and 0.7 a little less.
    assert (float(tau[0]) > 0.1, float(tau[3]) < 0.7) == (True, True)
    summary = summarise(tau, tau_min=0.1, tau_max=0.7)
    assert (summary.share_at_tau_min, summary.share_at_tau_max) == (0.5, 0.25)


@given(st.lists(st.tuples(st.integers(-1, 4), st.floats(0.0625, 1.0, width=32)), max_size=40))
def test_the_mean_of_a_class_is_that_of_its_samples(samples):
    codes = np.array([code for code, _ in samples], np.int64)
    tau = np.array([value for _, value in samples], np.float32)
    means = mean_by_class(codes, tau, 5)
    for code in range(5):
        members = [value for other, value in samples if other == code]
        assert means[code] == pytest.approx(np.mean(members)) if members else np.isnan(means[code])


def test_classes_stand_by_size_then_name_and_a_sample_without_a_class_is_in_none():
    groups = pa.chunked_array([["b", "c", None], ["a", "c", "c"]])
    classes = summarise_classes(groups, EVERYBODY, [side_of([0.1, 0.2, 0.9, 0.3, 0.4, 0.6])])
    assert classes.names == ["c", "a", "b"]
    assert classes.sizes.tolist() == [3, 1, 1]
    assert classes.codes.tolist() == [2, 0, -1, 1, 0, 0]
    np.testing.assert_allclose(classes.mean_tau["first"], [0.4, 0.3, 0.1], rtol=1e-6)


def test_a_dataset_whose_samples_all_lack_a_class_has_no_classes():
    groups = pa.chunked_array([pa.array([None] * 6, pa.string())])
    assert summarise_classes(groups, EVERYBODY, [side_of([0.1] * 6)]) is None


def test_unvisited_samples_count_in_class_size_but_not_in_mean_tau():
    groups = pa.chunked_array([["a", "a", "a", "b", "b", "c"]])
    visited = np.array([True, False, True, True, True, False])
    classes = summarise_classes(groups, visited, [side_of([0.1, 0.9, 0.3, 0.5, 0.7, 0.9])])
    assert classes.sizes.tolist() == [3, 2, 1]
    np.testing.assert_allclose(classes.mean_tau["first"], [0.2, 0.6, np.nan], rtol=1e-6)
    assert classes.correlation["first"].spearman == pytest.approx(-1.0)


def long_tail():
    """Sizes of 60 classes, the samples' codes, and temperatures that rise with size."""
    sizes = np.arange(60, 0, -1)
    codes = np.repeat(np.arange(60), sizes)
    noise = np.random.default_rng(3).normal(0, 0.002, len(codes))
    return sizes, codes, (0.05 + 0.001 * sizes[codes] + noise).astype(np.float32)


def test_tau_that_follows_class_size_correlates_and_with_permuted_labels_does_not():
    sizes, codes, tau = long_tail()
    found = correlate(sizes, codes, tau, np.ones(len(codes), bool))
    assert found.spearman > 0.95
    assert abs(found.permuted) < 0.15


def test_the_control_is_the_mean_over_permutations_of_the_samples_labels():
    sizes, codes, tau = long_tail()
    visited = np.random.default_rng(4).random(len(codes)) < 0.9
    rng, control = np.random.default_rng(zlib.crc32(tau.tobytes())), []
    for _ in range(PERMUTATIONS):
        labels = rng.permutation(codes)
        members = [visited & (labels == code) for code in range(60)]
        known = [code for code in range(60) if members[code].any()]
        means = [tau[members[code]].mean(dtype=np.float64) for code in known]
        control.append(spearmanr(sizes[known], means).statistic)
    assert correlate(sizes, codes, tau, visited).permuted == pytest.approx(np.mean(control))


@pytest.mark.parametrize(("codes", "tau"), [([0, 0, 1, 1], [0.1, 0.2, 0.3, 0.4]), ([0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5])])
def test_classes_of_one_size_or_one_mean_tau_have_no_correlation(codes, tau):
    codes = np.array(codes)
    assert correlate(np.bincount(codes), codes, np.array(tau, np.float32), np.ones(4, bool)) is None


def test_permutations_that_leave_nothing_to_rank_do_not_count_in_the_control():
    codes, tau = np.array([0, 0, 0, 1]), np.array([0.1, 0.0, 0.0, 0.2], np.float32)
    visited = np.array([True, False, False, True])
    # Two samples are seen: every permutation that ranks them at all gives +1 or -1, and the others give nothing.
    found = correlate(np.array([3, 1]), codes, tau, visited)
    assert found.spearman == pytest.approx(-1.0)
    assert -1 <= found.permuted <= 1


def test_a_run_gives_both_sides_its_classes_and_no_note(hostile_run):
    temperatures = measure(read_run(hostile_run))
    assert [(side.name, side.label) for side in temperatures.sides] == [("first", "image"), ("second", "text")]
    assert temperatures.classes.sizes.tolist() == [34, 16, 8, 4, 2, 1]
    correlation = temperatures.classes.correlation
    assert correlation["first"].spearman == pytest.approx(1.0)
    assert correlation["second"].spearman == pytest.approx(-1.0)
    assert temperatures.notes == []


def test_temperatures_leave_out_samples_never_visited(hostile_dataset, write_run, tmp_path):
    tau = np.full(hostile_dataset.n, 0.2)
    visited = np.arange(hostile_dataset.n) % 3 == 0
    run = write_run(tmp_path / "run", hostile_dataset, {"first": tau, "second": tau}, visited=visited)
    summary = measure(read_run(run)).sides[0].summary
    assert (summary.min, summary.max) == (np.float32(0.2), np.float32(0.2))


def test_classes_of_which_no_two_differ_in_mean_tau_are_noted(hostile_dataset, write_run, tmp_path):
    tau = np.full(hostile_dataset.n, 0.25)
    run = write_run(tmp_path / "run", hostile_dataset, {"first": tau, "second": tau})
    assert "no correlation" in measure(read_run(run)).notes[0]


def test_a_dataset_without_classes_and_captions_is_noted(flat_dataset, write_run, tmp_path):
    run = write_run(tmp_path / "run", flat_dataset, {"sample": np.linspace(0.1, 0.9, flat_dataset.n)})
    temperatures = measure(read_run(run))
    assert [side.label for side in temperatures.sides] == ["sample"]
    assert temperatures.classes is None
    assert ["no captions" in temperatures.notes[0], "no classes" in temperatures.notes[1]] == [True, True]
