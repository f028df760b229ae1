"""What a view's pixels go through after the crop, against the same written plainly."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

from thermopile.pipeline.loading.pixels import gaussian_blur, normalise, recolour, solarise


@pytest.fixture
def view():
    return np.random.default_rng(0).uniform(0, 255, (3, 33, 33)).astype(np.float32)


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


def test_normalise_has_a_gain_and_an_offset_for_each_channel(view):
    gain, offset = np.array([0.5, 1.0, 2.0], np.float32), np.array([1.0, 0.0, -1.0], np.float32)
    wanted = view * gain[:, None, None] + offset[:, None, None]
    normalise(view, gain, offset)
    np.testing.assert_array_equal(view, wanted)
