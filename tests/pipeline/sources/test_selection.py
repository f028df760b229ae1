"""What is held out for tests, and how a long tail is cut."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from thermopile.pipeline.errors import SourceError
from thermopile.pipeline.sources import ClassGroups
from thermopile.pipeline.sources.splits import hold_out, long_tail, swapped_between_classes

sizes_of_classes = st.lists(st.integers(0, 30), min_size=1, max_size=12)


def groups_of(sizes, seed=0):
    of_sample = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    return ClassGroups(
        tuple(f"class {k}" for k in range(len(sizes))), np.random.default_rng(seed).permutation(of_sample)
    )


def per_class(groups, indices):
    return np.bincount(groups.of_sample[indices], minlength=len(groups.names))


@given(sizes_of_classes, st.data(), st.integers(0, 2**32))
def test_a_sample_is_in_the_train_set_or_in_the_test_set_and_both_are_sorted(sizes, data, seed):
    n = sum(sizes)
    assume(n > 1)
    count = data.draw(st.integers(1, n - 1))
    train, test = hold_out(n, groups_of(sizes), count, seed)
    assert len(test) == count
    assert (np.diff(train) > 0).all()
    assert (np.diff(test) > 0).all()
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(n))
    assert train.dtype == test.dtype == np.int64


@given(sizes_of_classes, st.data(), st.integers(0, 2**32))
def test_classes_give_alike_and_none_is_taken_whole_before_the_others(sizes, data, seed):
    groups = groups_of(sizes)
    most = np.maximum(np.array(sizes) - 1, 0)
    assume(most.sum() > 0)
    count = data.draw(st.integers(1, int(most.sum())))
    _, test = hold_out(sum(sizes), groups, count, seed)
    given_by = per_class(groups, test)
    assert (given_by <= most).all()
    assert (given_by[given_by < most] >= given_by.max() - 1).all()  # who gives less has no more to give


def test_classes_are_taken_whole_only_where_all_but_one_of_each_are_not_enough():
    groups = groups_of([1, 1, 4, 1])
    _, test = hold_out(7, groups, 5, 0)
    given_by = per_class(groups, test)
    assert given_by.sum() == 5
    assert given_by[2] >= 3


def test_a_share_of_an_unlabelled_source_is_held_out():
    train, test = hold_out(1000, None, 0.05, 0)
    assert (len(train), len(test)) == (950, 50)
    assert test.mean() == pytest.approx(500, abs=120)  # of everywhere


def test_the_seed_alone_decides_who_is_held_out():
    groups = groups_of([40, 40])
    first, again, other = (hold_out(80, groups, 10, seed)[1] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("asked", [0, 0.001, 10, 11.0])
def test_holding_out_none_or_all_is_refused_with_the_numbers(asked):
    with pytest.raises(SourceError, match="of 10 samples cannot be held out; hold out 1 to 9"):
        hold_out(10, None, asked, 0)


@given(sizes_of_classes, st.floats(1.01, 1000), st.integers(0, 2**32), st.data())
def test_class_k_keeps_what_the_rule_says_and_at_most_what_it_has(sizes, ratio, seed, data):
    groups = groups_of(sizes)
    n = sum(sizes)
    assume(n > 0)
    indices = np.sort(data.draw(st.permutations(range(n))))[: data.draw(st.integers(1, n))]
    kept = long_tail(indices, groups, ratio, seed)
    assert (np.diff(kept) > 0).all()
    assert np.isin(kept, indices).all()
    had, has = per_class(groups, indices), per_class(groups, kept)
    for k in range(len(sizes)):
        by_rule = had.max() * ratio ** (-k / max(len(sizes) - 1, 1))
        assert has[k] in {min(had[k], int(by_rule + e)) for e in (-1e-6, 0, 1e-6)}


def test_cifar_100_with_ratio_100_has_the_published_10847_samples():
    groups = groups_of([500] * 100)
    kept = per_class(groups, long_tail(np.arange(50_000), groups, 100, 0))
    assert (kept[0], kept[-1], kept.sum()) == (500, 5, 10_847)


@pytest.mark.parametrize("ratio", [1.0, 0.01, float("inf"), float("nan")])
def test_a_ratio_that_makes_no_tail_is_refused(ratio):
    with pytest.raises(SourceError, match="must be finite and above 1"):
        long_tail(np.arange(10), groups_of([5, 5]), ratio, 0)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_samples_without_a_class_all_stay_and_are_no_step_of_the_tail(place):
    sizes, names = [16, 16, 16], ["ant", "bee", "cow"]
    sizes.insert(place, 40)
    names.insert(place, "")
    groups = groups_of(sizes)._replace(names=tuple(names))
    kept = per_class(groups, long_tail(np.arange(88), groups, 4, 0))
    assert dict(zip(names, kept.tolist(), strict=True)) == {"": 40, "ant": 16, "bee": 8, "cow": 4}


def test_a_long_tail_of_samples_that_all_have_no_class_is_refused():
    groups = groups_of([0, 0, 9])._replace(names=("ant", "bee", ""))
    with pytest.raises(SourceError, match="no sample has one"):
        long_tail(np.arange(9), groups, 4, 0)


@given(st.integers(1, 40), st.integers(4, 9), st.integers(0, 2**32))
def test_each_sample_is_replaced_by_one_of_another_class(of_a_class, classes, seed):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes), of_a_class))
    chosen = rng.permutation(1000)[: len(labels)]
    partners = swapped_between_classes(chosen, labels, np.random.default_rng(seed))
    label_of = dict(zip(chosen.tolist(), labels.tolist(), strict=True))
    assert sorted(partners.tolist()) == sorted(chosen.tolist())
    assert all(label_of[partner] != label for partner, label in zip(partners.tolist(), labels.tolist(), strict=True))
    again = swapped_between_classes(chosen, labels, np.random.default_rng(seed))
    assert again.tolist() == partners.tolist()


def test_classes_that_are_too_large_to_swap_between_are_refused():
    with pytest.raises(SourceError, match="8 samples cannot be swapped between classes, since 3 of them are of one"):
        swapped_between_classes(np.arange(8), np.array([0, 0, 0, 1, 1, 2, 2, 3]), np.random.default_rng(0))
