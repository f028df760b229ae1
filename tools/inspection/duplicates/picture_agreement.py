"""Compare two pictures up to a scale of a few per cent, a shift, brightness, contrast and encoding.

Pictures are compared as 32×32 grey levels, smoothed so that what JPEG loses at another quality does not count. One is
warped onto the other by Gauss-Newton, which fits scale, shift, gain and offset; after the smoothing it needs no search.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

EDGE = 32
SMOOTHING = 1.0
"""Standard deviation of the smoothing, in pixels of the 32."""
MIN_CORRELATION = 0.995
"""Follows the contrast: what differs is at most sqrt(1 - 0.995²), a tenth, of the grey levels' standard deviation."""
MAX_DIFFERENCE = 1.9
"""Root mean squared difference, in grey levels of 0 … 255, after smoothing and alignment. Correlation alone does not
tell a copy from another drawing of high contrast, with noise of its own: `benchmarks/duplicates.py` shows both."""

_MARGIN = 3
"""Pixels left out on each side, since a warp may move them in from outside."""
_MAX_SCALE, _MAX_SHIFT = 0.08, 3.0
_ITERATIONS = 8
_CENTRE = (EDGE - 1) / 2
_WINDOW = np.arange(_MARGIN, EDGE - _MARGIN, dtype=np.float32) - np.float32(_CENTRE)
_GREY = np.array([0.299, 0.587, 0.114], np.float32)


class Agreement(NamedTuple):
    """How well pairs of pictures agree once aligned."""

    correlation: NDArray[np.float32]
    """float32 [p]: normalised correlation of the grey levels; 0 if a picture is of one colour."""
    difference: NDArray[np.float32]
    """float32 [p]: root mean squared difference in grey levels; infinite if a picture is of one colour."""

    @property
    def same(self) -> NDArray[np.bool_]:
        return (self.correlation >= MIN_CORRELATION) & (self.difference <= MAX_DIFFERENCE)

    def of(self, which: NDArray[Any]) -> Agreement:
        """Return chosen pairs, by a mask or by indices."""
        return Agreement(self.correlation[which], self.difference[which])


def prepare(pictures: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the smoothed grey levels, float32 [m, 32, 32], of pictures, float32 [m, 3, 32, 32] in 0 … 255."""
    from scipy.ndimage import gaussian_filter  # late, as few inspections need it

    grey = np.tensordot(pictures, _GREY, axes=(1, 0))
    return np.asarray(gaussian_filter(grey, (0, SMOOTHING, SMOOTHING)), np.float32)


def agreement(first: NDArray[np.float32], second: NDArray[np.float32]) -> Agreement:
    """Align pairs of prepared pictures, float32 [p, 32, 32] each, and compare them."""
    scale, shift = np.ones(len(first), np.float32), np.zeros((len(first), 2), np.float32)
    sources = first, np.gradient(first, axis=1), np.gradient(first, axis=2)
    wanted = second[:, _MARGIN:-_MARGIN, _MARGIN:-_MARGIN].reshape(len(second), -1)
    for _ in range(_ITERATIONS):
        warped, by_y, by_x = _warp(sources, scale, shift)
        by_scale = _WINDOW[:, None] * by_y + _WINDOW * by_x
        columns = np.stack([warped, np.ones_like(warped), by_scale, by_y, by_x], 1).reshape(len(first), 5, -1)
        normal = (columns @ columns.transpose(0, 2, 1)).astype(np.float64)
        right = (columns @ wanted[:, :, None]).astype(np.float64)
        # Pictures without structure have no unique alignment: the ridge keeps the solution of least squares finite.
        ridge = 1e-6 * np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(5) + 1e-6 * np.eye(5)
        step = np.linalg.solve(normal + ridge, right)[:, :, 0]
        # The last three are products with the gain.
        gain = np.where(np.abs(step[:, :1]) < 0.1, 1, step[:, :1])
        move = np.clip(step[:, 2:] / gain, -1, 1).astype(np.float32)
        scale = np.clip(scale + move[:, 0], 1 - _MAX_SCALE, 1 + _MAX_SCALE)
        shift = np.clip(shift + move[:, 1:], -_MAX_SHIFT, _MAX_SHIFT)
    (warped,) = _warp(sources[:1], scale, shift)
    return _compare(warped.reshape(len(first), -1), wanted)


def _compare(first: NDArray[np.float32], second: NDArray[np.float32]) -> Agreement:
    first, second = first - first.mean(1, keepdims=True), second - second.mean(1, keepdims=True)
    spreads = np.sqrt((first**2).mean(1)), np.sqrt((second**2).mean(1))
    product, flat = spreads[0] * spreads[1], np.minimum(*spreads) < 1e-3
    correlation = np.where(flat, 0, (first * second).mean(1) / np.where(flat, 1, product))
    # What is left of the one with more contrast after the best gain and offset.
    difference = np.maximum(*spreads) * np.sqrt(np.maximum(1 - correlation**2, 0))
    return Agreement(correlation.astype(np.float32), np.where(flat, np.inf, difference).astype(np.float32))


def _warp(
    sources: tuple[NDArray[np.float32], ...], scale: NDArray[np.float32], shift: NDArray[np.float32]
) -> list[NDArray[np.float32]]:
    """Sample each of `sources`, [p, 32, 32], at centre + (window - centre) * scale + shift; [p, 26, 26] each."""
    rows, columns = (_weights(scale, shift[:, axis]) for axis in (0, 1))
    return [np.asarray(rows @ source @ columns.transpose(0, 2, 1), np.float32) for source in sources]


def _weights(scale: NDArray[np.float32], shift: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weights of cubic convolution along one axis, float32 [p, 26, 32]; rows add up to 1.

    Source: Keys, Cubic convolution interpolation for digital image processing, 1981; a = -1/2.
    """
    at = np.clip(np.float32(_CENTRE) + _WINDOW * scale[:, None] + shift[:, None], 0, EDGE - 1)
    t = np.abs(at[:, :, None] - np.arange(EDGE, dtype=np.float32))
    near, far = (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2
    weights = np.where(t <= 1, near, np.where(t < 2, far, 0))
    return np.asarray(weights / weights.sum(2, keepdims=True), np.float32)
