import numpy as np
import pytest

from thermopile.tools.inspection.summary import in_words, p_value, share, sparkline
from thermopile.tools.inspection.temperatures.associations import Association
from thermopile.tools.inspection.temperatures.distribution import Distribution


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0%"),
        (1, "100%"),
        (0.5, "50%"),
        (217 / 10_847, "2%"),
        (0.99999, "over 99.99%"),
        (0.00001, "under 0.01%"),
        (None, "unknown"),
    ],
)
def test_0_and_100_percent_are_shown_only_if_exact(value, shown):
    assert share(value) == shown


@pytest.mark.parametrize(
    ("areas", "figures"),
    [
        ((0.71, 0.65, 0.77), "in 71% of comparisons with the rest, 65 to 77%"),
        ((0.998, 0.98, 1.0), "in over 99% of comparisons with the rest, 98 to 100%"),
        ((0.002, 0.0, 0.02), "in over 99% of comparisons with the rest, 98 to 100%"),
    ],
)
def test_an_association_with_an_exception_is_not_said_to_hold_always(areas, figures):
    assert in_words("image", Association("lowest", "copies", *areas, None)).endswith(f" ({figures}).")


@pytest.mark.parametrize(("value", "shown"), [(3e-20, "< 1e-16"), (0.0312, "0.03"), (None, "unknown")])
def test_a_p_value_is_not_more_exact_than_it_can_be(value, shown):
    assert p_value(value) == shown


def test_a_line_of_bars_is_as_high_as_its_counts_and_shows_whatever_is_there():
    values = Distribution()
    values.add(np.repeat(np.arange(16, dtype=np.float32), [80, *[0] * 7, 1, *[0] * 6, 40]))
    assert sparkline(values) == "█·······▂······▅"
