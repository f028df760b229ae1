import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from scipy.stats import t as student

from thermopile.tools.inspection.summary import verdicts
from thermopile.tools.inspection.temperatures import groups as groups_module
from thermopile.tools.inspection.temperatures.correlation import PERMUTATIONS, Correlation, correlate, mean_by_group
from thermopile.tools.inspection.temperatures.groups import GroupCounts, TooManyGroupsError, codes_of

LIMITS = {"image": (0.3, 0.15, 0.55)}
"""The side's mean, what the coldest lie below, what the hottest do not lie below."""


def grouped(labels, tau, visited=None, *, pieces=1):
    """Return the figures of one side whose samples are counted in this number of pieces."""
    tau = np.array(tau, np.float32)
    visited = np.ones(len(tau), bool) if visited is None else np.array(visited)
    names = sorted({*labels} - {None})
    codes = np.array([-1 if label is None else names.index(label) for label in labels], np.int32)
    counts, pool = GroupCounts("group", codes, names, LIMITS), np.flatnonzero(visited)
    for places in np.array_split(np.arange(len(tau)), pieces):
        block = range(places[0], places[-1] + 1) if len(places) else range(0)
        counts.add(block, np.ones(len(places), bool), visited[places], {"image": tau[places]})
    return counts.result(pool, {"image": tau[pool]})


@given(st.lists(st.tuples(st.integers(-1, 4), st.floats(0.0625, 1.0, width=32)), max_size=40))
def test_the_mean_of_a_group_is_that_of_its_samples(samples):
    codes = np.array([code for code, _ in samples], np.int64)
    tau = np.array([value for _, value in samples], np.float32)
    means = mean_by_group(codes, tau, 5)
    for code in range(5):
        members = [value for other, value in samples if other == code]
        assert means[code] == pytest.approx(np.mean(members)) if members else np.isnan(means[code])


NAMED = st.tuples(st.sampled_from(["a", "b", "c", None]), st.floats(0.0625, 1, width=32), st.booleans())


@given(st.lists(NAMED, min_size=1, max_size=40).filter(lambda rows: any(row[0] for row in rows)), st.integers(1, 5))
def test_groups_counted_in_pieces_have_their_samples_size_mean_and_interval(rows, pieces):
    labels, tau, visited = zip(*rows, strict=True)
    found = grouped(labels, tau, visited, pieces=pieces)
    for place, name in enumerate(found.names):
        seen = np.array([value for label, value, was in rows if label == name and was])
        assert (found.sizes[place], found.visited[place]) == (labels.count(name), len(seen))
        mean, half = found.tau["image"].mean[place], found.tau["image"].half_width[place]
        assert mean == pytest.approx(seen.mean()) if len(seen) else np.isnan(mean)
        if len(seen) < 5:  # Student's t makes it absurdly wide
            assert np.isnan(half)
        else:
            wanted = student.ppf(0.975, len(seen) - 1) * seen.std(ddof=1) / np.sqrt(len(seen))
            assert half == pytest.approx(wanted, abs=1e-7)


def test_groups_stand_by_size_then_name_and_a_sample_without_one_is_in_none():
    found = grouped(["b", "c", None, "a", "c", "c"], [0.1, 0.2, 0.9, 0.3, 0.4, 0.6], pieces=2)
    assert found.names == ["c", "a", "b"]
    assert found.sizes.tolist() == [3, 1, 1]
    assert found.pool_codes.tolist() == [2, 0, -1, 1, 0, 0]


def test_without_any_label_there_are_no_groups():
    assert grouped([None] * 6, [0.1] * 6) is None


def test_unvisited_samples_count_in_the_size_but_not_in_mean_tau():
    visited = [True, False, True, True, True, False]
    found = grouped(["a", "a", "a", "b", "b", "c"], [0.1, 0.9, 0.3, 0.5, 0.7, 0.9], visited)
    assert found.sizes.tolist() == [3, 2, 1]
    np.testing.assert_allclose(found.tau["image"].mean, [0.2, 0.6, np.nan], rtol=1e-6)
    assert found.correlation["image"].spearman == pytest.approx(-1.0)


def test_head_medium_and_tail_say_where_the_coldest_and_the_hottest_samples_are():
    labels = ["a"] * 4 + ["b"] * 2 + ["c"]
    found = grouped(labels, [0.6, 0.6, 0.6, 0.1, 0.6, 0.3, 0.1])
    bands = {band.name: band for band in found.bands}
    assert [(band.groups, band.samples) for band in found.bands] == [(1, 4), (1, 2), (1, 1)]
    head, tail = bands["head"].tau["image"], bands["tail"].tau["image"]
    assert (head.share_of_hottest, head.share_of_coldest) == (0.75, 0.5)
    assert (tail.share_of_hottest, tail.share_of_coldest) == (0.0, 0.5)
    assert head.mean == pytest.approx(np.mean([0.6, 0.6, 0.6, 0.1]))
    assert (tail.mean, tail.half_width) == (pytest.approx(0.1), None)


def test_a_column_with_a_value_for_every_sample_is_no_grouping(hostile_dataset, monkeypatch):
    monkeypatch.setattr(groups_module, "MAX_GROUPS", 3)
    with pytest.raises(TooManyGroupsError, match="column uri has more than 3 values"):
        codes_of(hostile_dataset, "uri")


def long_tail():
    """Sizes of 60 groups, the samples' codes, and temperatures that rise with size."""
    sizes = np.arange(60, 0, -1)
    codes = np.repeat(np.arange(60), sizes)
    noise = np.random.default_rng(3).normal(0, 0.002, len(codes))
    return sizes, codes, (0.05 + 0.001 * sizes[codes] + noise).astype(np.float32)


def test_tau_that_follows_group_size_correlates_and_with_permuted_labels_does_not():
    sizes, codes, tau = long_tail()
    found = correlate(sizes, mean_by_group(codes, tau, 60), codes, tau)
    assert found.spearman > 0.95
    assert found.p_value < 1e-20
    assert abs(found.permuted) < 0.15


def test_the_control_is_the_mean_over_permutations_of_the_samples_labels():
    sizes, codes, tau = long_tail()
    rng, control = np.random.default_rng(zlib.crc32(tau.tobytes())), []
    for _ in range(PERMUTATIONS):
        labels = rng.permutation(codes)
        means = [tau[labels == code].mean(dtype=np.float64) for code in range(60)]
        control.append(spearmanr(sizes, means).statistic)
    found = correlate(sizes, mean_by_group(codes, tau, 60), codes, tau)
    assert found.permuted == pytest.approx(np.mean(control))
    assert found.permuted_range == pytest.approx((min(control), max(control)))


@pytest.mark.parametrize("direction", [1, -1])
def test_the_control_lies_on_the_side_to_which_tau_is_skewed(direction):
    sizes = np.repeat([1, 2, 4, 8, 16, 32, 64, 128, 256], 12)
    codes = np.repeat(np.arange(len(sizes)), sizes)
    skewed = np.random.default_rng(0).lognormal(0, 1, len(codes))  # follows no class
    tau = (0.1 + direction * 0.001 * skewed).astype(np.float32)
    found = correlate(sizes, mean_by_group(codes, tau, len(sizes)), codes, tau)
    assert 0.15 < direction * found.permuted < 0.3
    assert not found.is_likely


CHANCE = (-0.11, 0.03)


@pytest.mark.parametrize(
    ("spearman", "p_value", "chance", "words"),
    [
        (0.46, 2e-6, CHANCE, "weak but certain: +0.46, p 2e-6, by chance -0.11 to +0.03"),
        (-0.46, 2e-6, CHANCE, "weak but certain: -0.46, p 2e-6, by chance -0.11 to +0.03"),
        (0.95, 1e-30, CHANCE, "very strong and certain: +0.95, p < 1e-16, by chance -0.11 to +0.03"),
        (0.71, 0.02, CHANCE, "strong and likely: +0.71, p 0.02, by chance -0.11 to +0.03"),
        (0.496, 0.0009, CHANCE, "moderate and certain: +0.50, p 0.0009, by chance -0.11 to +0.03"),
        (0.9, 0.05, CHANCE, "very strong but uncertain: +0.90, p 0.05, by chance -0.11 to +0.03"),
        (0.3, 0.4, CHANCE, "weak and uncertain: +0.30, p 0.4, by chance -0.11 to +0.03"),
        (0.29, 0.001, CHANCE, "negligible but likely: +0.29, p 0.001, by chance -0.11 to +0.03"),
        (-0.1, 1e-9, CHANCE, "negligible and uncertain: -0.10, p 1e-9, by chance -0.11 to +0.03"),
        (-0.05, 0.5, (0.0, 0.1), "negligible and uncertain: -0.05, p 0.5, by chance +0.00 to +0.10"),
        (1.0, 1.0, None, "very strong but uncertain: +1.00, p 1, by chance unknown"),
    ],
)
def test_a_correlation_is_told_by_its_strength_and_by_how_certain_it_is(spearman, p_value, chance, words):
    assert verdicts({"image": Correlation(spearman, p_value, 0.0, chance)}) == words


@pytest.mark.parametrize(("codes", "tau"), [([0, 0, 1, 1], [0.1, 0.2, 0.3, 0.4]), ([0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5])])
def test_groups_of_one_size_or_one_mean_tau_have_no_correlation(codes, tau):
    codes, tau = np.array(codes), np.array(tau, np.float32)
    assert correlate(np.bincount(codes), mean_by_group(codes, tau, 2), codes, tau) is None


def test_the_p_value_of_few_groups_counts_permutations():
    # Of the 5! = 120 orders of the means, the one that is seen and its reverse are as extreme.
    sizes, codes = np.arange(5, 0, -1), np.repeat(np.arange(5), np.arange(5, 0, -1))
    tau = (0.1 + 0.01 * sizes[codes]).astype(np.float32)
    assert correlate(sizes, mean_by_group(codes, tau, 5), codes, tau).p_value == pytest.approx(2 / 120)


def test_permutations_that_leave_nothing_to_rank_do_not_count_in_the_control():
    # Of four permutations three put both visited samples into the first group, which leaves nothing to rank.
    codes, tau = np.array([0, 1]), np.array([0.1, 0.2], np.float32)
    found = correlate(np.array([3, 1]), mean_by_group(codes, tau, 2), codes, tau)
    assert (found.spearman, found.p_value) == (pytest.approx(-1.0), 1.0)
    assert -1 <= found.permuted <= 1
