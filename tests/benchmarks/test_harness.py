"""The harness: what a figure says, and the command line that a script's parts have."""

from importlib import import_module

import pytest
from click.testing import CliRunner

from thermopile.benchmarks.harness import Figure, plain, take_turns


def figure(ours, alternative=None, **asked):
    return Figure("name", "label", "ms", ours, alternative, **asked)


def test_the_ratio_says_how_many_times_better_ours_is():
    assert figure(2.0, 10.0).ratio == 5.0
    assert figure(2.0, 10.0, more_is_better=True).ratio == 0.2
    assert figure(2.0, 10.0, ratios=(1.0, 9.0, 4.0)).ratio == 4.0  # the median of the rounds
    assert figure(2.0).ratio is figure(0.0, 10.0).ratio is None


@pytest.mark.parametrize(
    ("measured", "asked", "held"),
    [(figure(20.0, at_most=20), "≤ 20 ms", True), (figure(20.1, at_most=20), "≤ 20 ms", False),
     (figure(10.0, 80.0, ratio_at_least=8), "ratio ≥ 8", True),
     (figure(10.1, 80.0, ratio_at_least=8), "ratio ≥ 8", False),
     (figure(20.0, 19.0, at_most=20, ratio_at_least=1), "≤ 20 ms, ratio ≥ 1", False),
     (figure(1.0, 2.0), "", None)],
)  # fmt: skip
def test_a_bound_is_asked_of_ours_or_of_the_ratio(measured, asked, held):
    assert (measured.asked, measured.held) == (asked, held)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0161, "0.0161"), (0.7, "0.70"), (5, "5"), (5.0, "5"), (10.46, "10.5"), (81.0, "81"), (1234.5, "1,234")],
)
def test_numbers_are_written_without_an_exponent(value, text):
    assert plain(value) == text


def test_contenders_take_turns_and_the_first_round_only_warms_up():
    calls = []

    def measure(contender):
        return lambda number: calls.append((number, contender)) or number * len(contender)

    found = take_turns("test", {"ours": measure("ours"), "other": measure("other")}, 2)
    assert calls == [(0, "ours"), (0, "other"), (1, "ours"), (1, "other"), (2, "ours"), (2, "other")]
    assert found == {"ours": [4, 8], "other": [5, 10]}


OWN = """
from dataclasses import dataclass
from thermopile.benchmarks.harness import Figure, Measured, Part, script

@dataclass(frozen=True)
class Sizes:
    count: int

def measure(sizes, directory):
    return Measured(f"{sizes.count} in {directory.name}", "", [Figure("f", "label", "ms", sizes.count, at_most=20)])

command = script("About.", {"part": Part(measure, Sizes(30), Sizes(3))}, "torch")
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Runs this benchmark; the process of its part imports it by its name."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_benchmark.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        command = import_module("own_benchmark").command
        yield lambda *words: CliRunner().invoke(command, words)


def test_full_sizes_are_judged_in_a_table_and_others_are_not(own):
    full = own().stdout
    assert "part: 30 in thermopile-benchmark-" in full
    assert "≤ 20 ms: missed" in full
    other = own("--set", "count=25").stdout
    assert "part: 25 in" in other
    assert "missed" not in other


def test_a_size_that_no_part_has_is_wrong_usage(own):
    done = own("--set", "rows=5")
    assert done.exit_code == 2
    assert "--set rows=5: the sizes are count, each with =VALUE" in done.stderr
