from dataclasses import replace

import pytest

from thermopile.tools.bench.objective.contenders import Case
from thermopile.tools.bench.objective.measuring import Peaks, Times, asked_figures, without_room
from thermopile.tools.bench.objective.sizes import FULL
from thermopile.tools.bench.objective.timing import Timed

JUDGED = Case("isogclr", "bimodal", batch=2048, dim=512, device="cpu")
LARGE = replace(JUDGED, batch=32_768)


def times(case, products, **fastclip):
    ratios = {"ours": 1.0, "products": products, **fastclip}
    return Times(case, Timed(dict.fromkeys(ratios, 1.0), ratios, rounds=5, threads=2), {})


def held(figures):
    return {figure.name: figure.held for figure in figures}


@pytest.mark.parametrize(
    ("products", "fastclip", "expected"),
    [(1 / 1.34, 4.1, (True, True)), (1 / 1.36, 4.1, (False, True)), (1 / 1.34, 3.9, (True, False))],
)
def test_ours_may_take_a_little_over_three_products_and_a_quarter_of_fastclips_path(products, fastclip, expected):
    figures = asked_figures([times(JUDGED, products, fastclip=fastclip)], [])
    assert held(figures) == dict(zip(("over_products", "fastclip_over_ours"), expected, strict=True))


@pytest.mark.parametrize(("mebibytes", "expected"), [(1023, True), (1025, False)])
def test_a_large_batch_may_take_a_gibibyte(mebibytes, expected):
    figures = asked_figures([], [Peaks(LARGE, {"ours": mebibytes * 2**20}, {})])
    assert held(figures) == {"peak_gib": expected}


@pytest.mark.parametrize(
    "other", [{"batch": 1024}, {"dim": 256}, {"name": "sogclr"}, {"mode": "unimodal"}, {"device": "cuda"}]
)
def test_nothing_is_asked_of_times_at_other_sizes(other):
    assert asked_figures([times(replace(JUDGED, **other), 0.1, fastclip=0.1)], []) == []


def test_what_was_not_measured_is_not_asked_for():
    not_measured = Times(JUDGED, None, {"ours": "killed"})
    assert asked_figures([not_measured], [Peaks(LARGE, {}, {"ours": "killed"})]) == []
    assert held(asked_figures([times(JUDGED, 0.9)], [])) == {"over_products": True}


def test_the_full_scale_holds_the_sizes_that_are_judged():
    assert JUDGED.batch in FULL.time_batches
    assert LARGE.batch in FULL.memory_batches


def test_a_contender_that_needs_more_than_is_free_is_left_out_with_both_numbers():
    left_out = without_room(LARGE, free=10 * 10**9)
    assert set(left_out) == {"autograd", "fastclip"}
    assert left_out["fastclip"] == "it needs about 69.7 GB of memory, but 10.0 GB are free"
    assert without_room(JUDGED, free=10 * 10**9) == {}
