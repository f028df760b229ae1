"""What a view's pixels go through after the crop, against the same written plainly."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import affine_transform, gaussian_filter

from thermopile.pipeline.rng import nearly_normal
from thermopile.pipeline.views.pixels import add_noise, affine, gaussian_blur, recolour, solarise, store


@pytest.fixture
def view():
    return np.random.default_rng(0).uniform(0, 255, (3, 33, 33)).astype(np.float32)


@given(st.integers(0, 2**32), st.integers(1, 20))
def test_affine_interpolates_at_the_place_that_it_maps_to_and_repeats_the_edge(seed, size):
    rng = np.random.default_rng(seed)
    view = rng.uniform(0, 255, (3, size, size)).astype(np.float32)
    matrix = rng.uniform(-1.5, 1.5, (2, 3)).astype(np.float32)
    by_rows = matrix.astype(float)[::-1, [1, 0, 2]]  # scipy has y first, and counts from the first pixel's centre
    middle = (size - 1) / 2
    offset = size * by_rows[:, 2] + middle - by_rows[:, :2].sum(1) * middle
    wanted = [affine_transform(channel, by_rows[:, :2], offset, order=1, mode="nearest") for channel in view]
    affine(view, matrix)
    np.testing.assert_allclose(view, wanted, atol=0.01)


def test_affine_that_moves_nothing_changes_nothing(view):
    wanted = view.copy()
    affine(view, np.eye(3, dtype=np.float32)[:2].copy())
    np.testing.assert_array_equal(view, wanted)


@given(st.integers(0, 2**32))
def test_recolour_applies_both_matrices_and_clamps(seed):
    rng = np.random.default_rng(seed)
    view = rng.uniform(0, 255, (3, 9, 9)).astype(np.float32)
    matrix, of_mean = (rng.uniform(-1, 1.5, (2, 3, 3))).astype(np.float32)
    mean = view.reshape(3, -1).astype(float).mean(1)
    wanted = np.einsum("rc,cyx->ryx", matrix, view) + (of_mean @ mean)[:, None, None]
    recolour(view, matrix, of_mean)
    np.testing.assert_allclose(view, np.clip(wanted, 0, 255), atol=2e-3)


@pytest.mark.parametrize("sigma", [0.1, 0.34, 1.0, 1.7, 2.0, 4.0])
def test_blur_is_a_gaussian_cut_at_three_sigma_with_mirrored_borders(view, sigma):
    wanted = [gaussian_filter(channel, sigma, mode="mirror", radius=math.ceil(3 * sigma)) for channel in view]
    gaussian_blur(view, sigma)
    np.testing.assert_allclose(view, wanted, atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_blur_of_a_view_smaller_than_its_kernel_keeps_the_mean_level(size):
    view = np.full((3, size, size), 100, np.float32)
    gaussian_blur(view, 2.0)
    np.testing.assert_allclose(view, 100, rtol=1e-5)


def test_solarise_inverts_the_upper_half_alone():
    view = np.array([0, 100, 127.9, 128, 200, 255], np.float32).reshape(1, 1, 6).repeat(3, 0)
    solarise(view)
    np.testing.assert_allclose(view[2, 0], [0, 100, 127.9, 127, 55, 0])


def test_noise_has_the_deviation_asked_for_and_a_number_for_each_value():
    view = np.full((3, 50, 50), 128, np.float32)
    add_noise(view, 12.5, np.uint64(5))
    assert abs((view - 128).std() - 12.5) < 0.3
    assert view[1, 2, 3] == np.float32(128 + np.float32(12.5 * nearly_normal(np.uint64(5), np.uint64(2603))))
    for axis in range(3):
        rolled = np.roll(view, 1, axis)
        assert abs(np.corrcoef(view.reshape(-1), rolled.reshape(-1))[0, 1]) < 0.05


def test_noise_leaves_no_value_below_0_or_above_255(view):
    add_noise(view, 100.0, np.uint64(5))
    assert (view.min(), view.max()) == (0, 255)


def test_normalise_has_a_gain_and_an_offset_for_each_channel(view):
    gain, offset = np.array([0.5, 1.0, 2.0], np.float32), np.array([1.0, 0.0, -1.0], np.float32)
    wanted = view * gain[:, None, None] + offset[:, None, None]
    store(view, view, gain, offset)
    np.testing.assert_array_equal(view, wanted)
