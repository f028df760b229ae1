from thermopile.tools.bench.rounds import ratios, take_turns


def test_contenders_take_turns_and_the_first_round_only_warms_up():
    calls = []

    def measure(contender):
        return lambda number: calls.append((number, contender)) or number * len(contender)

    found = take_turns("test", {"ours": measure("ours"), "other": measure("other")}, 2)
    assert calls == [(0, "ours"), (0, "other"), (1, "ours"), (1, "other"), (2, "ours"), (2, "other")]
    assert found == {"ours": [4, 8], "other": [5, 10]}


def test_rates_are_compared_round_by_round():
    assert ratios([10.0, 30.0], [5.0, 10.0]) == (2.0, 3.0)
