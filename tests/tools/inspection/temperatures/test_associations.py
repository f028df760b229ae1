"""What the ends of the temperatures go with."""

import numpy as np
import pytest

from thermopile.tools.inspection.temperatures.associations import area_under_curve, associations

M = 5000


@pytest.fixture
def random():
    return np.random.default_rng(0)


def area_of(end, rest):
    is_end = np.arange(len(end) + len(rest)) < len(end)
    return area_under_curve(np.concatenate([end, rest]), is_end, ~is_end, None)


def by_end(found):
    return {(each.end, each.of): each for each in found}


def test_the_area_is_the_share_of_pairs_in_which_the_end_is_higher_with_ties_counted_half(random):
    end, rest = random.integers(0, 5, 30).astype(float), random.integers(1, 7, 400).astype(float)
    expected = np.mean([(a > b) + 0.5 * (a == b) for a in end for b in rest])
    assert area_of(end, rest)[0] == pytest.approx(expected)


def test_its_deviation_is_what_draws_show(random):
    drawn = [area_of(random.normal(0.5, 1, 60), random.normal(0, 1, 2000)) for _ in range(400)]
    areas, deviations = np.transpose(drawn)
    assert deviations.mean() == pytest.approx(areas.std(), rel=0.15)


def test_samples_of_one_group_count_as_one_where_they_share_a_property(random):
    def drawn():
        group = random.integers(0, 100, 2000)
        values, shifts = random.normal(0, 1, 100)[group], random.normal(0, 1, 100)
        is_end = np.argsort(np.argsort(shifts[group] + random.normal(size=2000))) < 400
        return *area_under_curve(values, is_end, ~is_end, group), area_under_curve(values, is_end, ~is_end, None)[1]

    areas, grouped, alone = np.transpose([drawn() for _ in range(300)])
    assert grouped.mean() == pytest.approx(areas.std(), rel=0.15)
    assert alone.mean() < 0.5 * areas.std()


def test_a_property_that_goes_with_low_temperatures_is_told_and_the_others_are_not(random):
    tau = random.normal(0.1, 0.01, M).astype(np.float32)
    rank = tau.argsort().argsort() / M
    found = associations(tau, {"rare word": -rank + 0.3 * random.random(M), "noise": random.random(M)})
    assert (found[0].of, found[0].is_notable, round(found[0].area)) == ("rare word", True, 1) or found[0].area < 0.5
    said = {(each.end, each.of) for each in found if each.is_notable}
    assert said == {("lowest", "rare word"), ("highest", "rare word")}
    assert by_end(found)["lowest", "rare word"].area > 0.9


def test_of_shuffled_temperatures_hardly_any_table_says_a_word(random):
    properties = {name: random.random(M) for name in "abcdefgh"}
    tables = [associations(random.normal(size=M).astype(np.float32), properties) for _ in range(40)]
    assert sum(any(each.is_notable for each in table) for table in tables) == 0
    assert sum(any(not each.low < 0.5 < each.high for each in table) for table in tables) <= 6  # LEVEL of tables


def test_what_goes_with_a_heap_alone_does_not_hold_within_the_heap(random):
    near = random.permutation(M).astype(float)
    is_heap = near >= 0.9 * M
    tau = np.where(is_heap, 0.01, 0.1) + random.random(M) * 0.005
    words = np.where(is_heap, 1.0, 0.0) + random.normal(0, 0.3, M)  # of the heap, not of its coldest
    own = -tau + random.random(M) * 0.0005
    found = by_end(associations(tau.astype(np.float32), {"words": words, "own": own, "near": near}, "near"))
    assert found["lowest", "words"].is_notable
    assert not found["lowest", "words"].stands
    assert found["lowest", "own"].stands
    assert found["lowest", "near"].within is None


def test_samples_without_a_value_or_a_temperature_are_left_out_and_few_samples_say_nothing(random):
    tau = random.normal(0.1, 0.01, M).astype(np.float32)
    words = -tau.astype(float)
    words[::2] = np.nan
    tau[1] = np.nan
    (low, _) = sorted(associations(tau, {"words": words}), key=lambda each: each.end, reverse=True)
    assert low.area == 1.0
    assert associations(tau[:50], {"words": words[:50]}) == []


def test_temperatures_that_many_share_are_no_end(random):
    tau = np.full(M, 0.05, np.float32)  # as all at tau_min
    tau[:10] = 0.04
    assert associations(tau, {"words": random.random(M)}) == []
