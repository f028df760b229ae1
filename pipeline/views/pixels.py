"""Pixel operations after the crop, in place on float32 [3, size, size] with values 0 … 255."""

import math

import numpy as np

from ...storage.arrays import Float32s, Uint8s
from ...storage.kernels import kernel
from ..rng import nearly_normal

Pixels = Float32s | Uint8s
"""Views as they leave the host: normalised, or as bytes for a GPU to normalise."""


@kernel()
def affine(view: Float32s, matrix: Float32s) -> None:
    """Move pixels as ViewParameters.affine says, float32 [2, 3]; bilinear, with the edge repeated beyond the border."""
    size, crop = view.shape[1], view.copy()
    last, middle = np.float32(size - 1), 0.5 * (size - 1)
    for y in range(size):
        for x in range(size):
            across, down = np.float32(x - middle), np.float32(y - middle)
            u = matrix[0, 0] * across + matrix[0, 1] * down + np.float32(matrix[0, 2] * size + middle)
            v = matrix[1, 0] * across + matrix[1, 1] * down + np.float32(matrix[1, 2] * size + middle)
            u, v = min(last, max(np.float32(0), u)), min(last, max(np.float32(0), v))
            left, top = int(u), int(v)
            right, bottom = min(left + 1, size - 1), min(top + 1, size - 1)
            to_right, to_bottom = u - np.float32(left), v - np.float32(top)
            for channel in range(view.shape[0]):
                upper, lower = crop[channel, top], crop[channel, bottom]
                above = upper[left] + to_right * (upper[right] - upper[left])
                below = lower[left] + to_right * (lower[right] - lower[left])
                view[channel, y, x] = above + to_bottom * (below - above)


@kernel()
def recolour(view: Float32s, matrix: Float32s, of_mean: Float32s) -> None:
    """pixel → matrix · pixel + of_mean · mean, clamped to 0 … 255; both float32 [3, 3], mean of the view's channels."""
    mean_red, mean_green, mean_blue = _mean(view[0]), _mean(view[1]), _mean(view[2])
    offset = of_mean[:, 0] * mean_red + of_mean[:, 1] * mean_green + of_mean[:, 2] * mean_blue
    low, high = np.float32(0), np.float32(255)
    for y in range(view.shape[1]):
        red, green, blue = view[0, y], view[1, y], view[2, y]
        for x in range(view.shape[2]):
            r, g, b = red[x], green[x], blue[x]
            red[x] = min(high, max(low, matrix[0, 0] * r + matrix[0, 1] * g + matrix[0, 2] * b + offset[0]))
            green[x] = min(high, max(low, matrix[1, 0] * r + matrix[1, 1] * g + matrix[1, 2] * b + offset[1]))
            blue[x] = min(high, max(low, matrix[2, 0] * r + matrix[2, 1] * g + matrix[2, 2] * b + offset[2]))


@kernel(fastmath={"reassoc"})  # allow sums in any order, for vector instructions
def _mean(channel: Float32s) -> np.float32:
    total = 0.0
    for y in range(channel.shape[0]):
        row = channel[y]
        for x in range(channel.shape[1]):
            total += row[x]
    return np.float32(total / channel.size)


@kernel()
def gaussian_blur(view: Float32s, sigma: float) -> None:
    """Blur with a Gaussian of `sigma` pixels, cut at ceil(3 sigma); borders mirror without repeating the edge."""
    size = view.shape[1]
    weights = _gaussian(sigma, size - 1)
    reach = len(weights) - 1
    wide, across = np.zeros(size + 2 * reach, np.float32), np.zeros((size + 2 * reach, size), np.float32)
    for channel in range(view.shape[0]):
        for y in range(size):
            _mirror(wide, view[channel, y], min(reach, size - 1))
            _convolve(across[reach + y], wide, 1, weights)
        for beyond in range(1, min(reach, size - 1) + 1):
            for x in range(size):
                across[reach - beyond, x] = across[reach + beyond, x]
                across[reach + size - 1 + beyond, x] = across[reach + size - 1 - beyond, x]
        for y in range(size):
            _convolve(view[channel, y], across[y : y + 2 * reach + 1].reshape(-1), size, weights)


@kernel()
def _gaussian(sigma: float, furthest: int) -> Float32s:
    """Return weights from the centre outwards, float32 [1 + a multiple of three], zero beyond the cut."""
    reach = min(math.ceil(3 * sigma), furthest)
    weights = np.zeros(1 + 3 * math.ceil(reach / 3), np.float32)
    total = 1.0
    for k in range(1, reach + 1):
        total += 2 * math.exp(-0.5 * (k / sigma) ** 2)
    for k in range(reach + 1):
        weights[k] = math.exp(-0.5 * (k / sigma) ** 2) / total
    return weights


@kernel()
def _mirror(wide: Float32s, row: Float32s, reach: int) -> None:
    """Copy row to the middle of wide, with `reach` mirrored pixels on both sides."""
    size = len(row)
    start = (len(wide) - size) // 2
    for x in range(size):  # to assign a slice, numba compiles the text of an error, for three seconds
        wide[start + x] = row[x]
    for beyond in range(1, reach + 1):
        wide[start - beyond] = row[beyond]
        wide[start + size - 1 + beyond] = row[size - 1 - beyond]


@kernel()
def _convolve(out: Float32s, lines: Float32s, step: int, weights: Float32s) -> None:
    """out[x] = Σ weights[|k|] · lines[(reach + k) · step + x], k from -reach to reach; reach is len(weights) - 1.

    step: 1 along a row, the length of a row down the columns, whose rows stand in `lines` one after another.
    """
    reach, size = len(weights) - 1, len(out)
    middle = lines[reach * step : reach * step + size]
    for x in range(size):
        out[x] = weights[0] * middle[x]
    for k in range(1, reach + 1, 3):  # with one weight at a time, most time would go into reading and writing `out`
        before, after = lines[(reach - k) * step :], lines[(reach + k) * step :]
        before_2, after_2 = lines[(reach - k - 1) * step :], lines[(reach + k + 1) * step :]
        before_3, after_3 = lines[(reach - k - 2) * step :], lines[(reach + k + 2) * step :]
        first, second, third = weights[k], weights[k + 1], weights[k + 2]
        for x in range(size):
            out[x] += (
                first * (before[x] + after[x])
                + second * (before_2[x] + after_2[x])
                + third * (before_3[x] + after_3[x])
            )


@kernel()
def solarise(view: Float32s) -> None:
    """Map values of 128 or more to 255 - value."""
    threshold, white = np.float32(128), np.float32(255)
    for channel in range(view.shape[0]):
        for y in range(view.shape[1]):
            row = view[channel, y]
            for x in range(len(row)):
                row[x] = white - row[x] if row[x] >= threshold else row[x]


@kernel()
def add_noise(view: Float32s, deviation: float, key: np.uint64) -> None:
    """Add noise as ViewParameters.noise says, and clamp to 0 … 255."""
    low, high = np.float32(0), np.float32(255)
    for channel in range(view.shape[0]):
        for y in range(view.shape[1]):
            row = view[channel, y]
            for x in range(len(row)):
                row[x] = min(high, max(low, row[x] + noise_at(deviation, key, view.shape[1], channel, y, x)))


@kernel()
def noise_at(deviation: float, key: np.uint64, side: int, channel: int, y: int, x: int) -> np.float32:
    """Return the noise for one value of a view, in levels of 255."""
    return np.float32(deviation * nearly_normal(key, np.uint64((channel * side + y) * side + x)))


@kernel()
def store(out: Pixels, view: Float32s, gain: Float32s, offset: Float32s) -> None:
    """Write value · gain + offset per channel, both float32 [3]. out: [3, size, size]; uint8 cuts the fraction off."""
    for channel in range(view.shape[0]):
        by, plus = gain[channel], offset[channel]
        for y in range(view.shape[1]):
            row, to = view[channel, y], out[channel, y]
            for x in range(len(row)):
                to[x] = row[x] * by + plus
