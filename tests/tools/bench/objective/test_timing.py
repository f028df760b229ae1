import pytest

from thermopile.tools.bench.objective.contenders import Case
from thermopile.tools.bench.objective.timing import time_case, times_ours


def test_the_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_medians():
    took = {"ours": [1.0, 2.0, 10.0], "products": [0.5, 2.0, 9.0]}
    assert times_ours(took) == {"ours": 1.0, "products": 0.9}


def test_every_contender_is_timed_five_times_at_least():
    case = Case("isogclr", "bimodal", batch=8, dim=4, device="cpu")
    timed = time_case(case, case.contenders, seconds=0.0)
    assert timed.rounds == 5
    assert set(timed.ms) == set(timed.times_ours) == set(case.contenders)
    assert min(timed.ms.values()) > 0
    assert timed.times_ours["ours"] == 1.0


@pytest.mark.parametrize("left", [("ours", "products"), ("ours",)])
def test_only_the_contenders_asked_for_are_timed(left):
    assert set(time_case(Case("isogclr", "bimodal", 8, 4, "cpu"), left, seconds=0.0).ms) == set(left)
