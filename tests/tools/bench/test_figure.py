import pytest

from thermopile.tools.bench.figure import Figure, plain_number


def figure(ours, alternative=None, **asked):
    return Figure("name", "label", "ms", ours, alternative, **asked)


def test_the_ratio_says_how_many_times_better_ours_is():
    assert figure(2.0, 10.0).ratio == 5.0
    assert figure(2.0, 10.0, more_is_better=True).ratio == 0.2


def test_there_is_no_ratio_without_an_alternative_or_to_nothing_at_all():
    assert figure(2.0).ratio is None
    assert figure(0.0, 10.0).ratio is None


@pytest.mark.parametrize(("ours", "held"), [(19.0, True), (20.0, True), (20.1, False)])
def test_a_bound_is_asked_of_ours(ours, held):
    asked = figure(ours, at_most=20)
    assert (asked.asked, asked.held) == ("≤ 20 ms", held)


@pytest.mark.parametrize(("ours", "held"), [(3.9, False), (4.0, True), (4.1, True)])
def test_a_bound_from_below_is_asked_of_ours(ours, held):
    asked = figure(ours, at_least=4)
    assert (asked.asked, asked.held) == ("≥ 4 ms", held)


@pytest.mark.parametrize(("ours", "held"), [(10.0, True), (10.1, False)])
def test_a_ratio_is_asked_of_both(ours, held):
    asked = figure(ours, 80.0, ratio_at_least=8)
    assert (asked.asked, asked.held) == ("ratio ≥ 8", held)


def test_nothing_asked_is_neither_held_nor_missed():
    assert (figure(1.0, 2.0).asked, figure(1.0, 2.0).held) == ("", None)
    assert figure(1.0).to_json(judged=True)["asked"] is None


def test_only_sizes_that_a_figure_is_asked_for_are_judged():
    asked = figure(1.0, at_most=20)
    assert asked.to_json(judged=True)["held"] is True
    assert asked.to_json(judged=False)["held"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0161, "0.0161"), (0.7, "0.70"), (5, "5"), (5.0, "5"), (10.46, "10.5"), (81.0, "81"), (1234.5, "1,234")],
)
def test_numbers_are_written_without_an_exponent(value, text):
    assert plain_number(value) == text


def test_where_contenders_took_turns_the_ratio_is_the_median_of_the_rounds():
    asked = figure(2.0, 10.0, ratios=(1.0, 9.0, 4.0), ratio_at_least=4)
    assert (asked.ratio, asked.held) == (4.0, True)
    assert asked.to_json(judged=True)["ratios"] == [1.0, 9.0, 4.0]
