from thermopile.tools.bench.state.measured import StepSeconds, excess, store_share


def test_the_share_is_of_all_the_time_and_not_a_mean_of_shares():
    assert store_share([StepSeconds(store=1.0, whole=9.0), StepSeconds(store=0.0, whole=1.0)]) == 10.0


def test_the_excess_counts_what_every_step_took_more_than_the_median_in_quiet():
    assert excess([3.0, 5.0], quiet=[1.0, 2.0, 100.0]) == 4.0
    assert excess([1.0], quiet=[2.0]) == 0.0
