"""How far two methods are apart, and its error: by seeds, by test samples, and by both."""

import numpy as np
import pytest
from scipy.stats import t

from thermopile.benchmarks.reproduction.comparison import in_points


def test_seeds_that_agree_leave_the_error_of_the_test_samples():
    samples = np.array([1.0, 0, 0, -1, 0, 1, 1, 0])
    found = in_points(np.tile(samples, (5, 1)), None)
    assert found.points == pytest.approx(25)
    assert found.noise == pytest.approx(100 * t.ppf(0.975, 7) * samples.std(ddof=1) / np.sqrt(8))


def test_samples_that_agree_leave_the_error_of_the_seeds_by_students_t():
    seeds = np.array([0.01, 0.03, -0.02, 0.0, 0.05])
    found = in_points(np.tile(seeds[:, None], (1, 50)), None)
    assert found.points == pytest.approx(1.4)
    assert found.noise == pytest.approx(100 * t.ppf(0.975, 4) * seeds.std(ddof=1) / np.sqrt(5))


def test_samples_that_share_a_caption_count_as_one():
    once = np.tile(np.random.default_rng(0).integers(-1, 2, 40).astype(float), (5, 1))
    four_times = np.repeat(once, 4, axis=1)
    clustered, separate = in_points(four_times, np.repeat(np.arange(40), 4)), in_points(four_times, None)
    assert clustered.noise == pytest.approx(in_points(once, None).noise)
    assert separate.noise == pytest.approx(clustered.noise / 2, rel=0.05)  # and 159 degrees of freedom for 39


@pytest.mark.parametrize(("of_seed", "of_sample"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1.0), (0.1, 1.0)])
def test_the_interval_holds_the_truth_in_19_of_20_experiments(of_seed, of_sample):
    rng, held, widths = np.random.default_rng(1), 0, []
    for _ in range(400):
        values = rng.normal(0, of_seed, (5, 1)) + rng.normal(0, of_sample, (1, 200)) + rng.normal(0, 1, (5, 200))
        found = in_points(values, None)
        held += abs(found.points) <= found.noise
        widths.append(found.noise)
    assert 0.93 <= held / 400 <= 0.99
    truly = 100 * np.sqrt(of_seed**2 / 5 + of_sample**2 / 200 + 1 / 1000)
    assert np.mean(widths) < 1.6 * 1.96 * truly  # t of four degrees of freedom alone is 1.42 times as wide
