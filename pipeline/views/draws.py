"""Draw a view's crop, affine map and colour, each from the view's key by random numbers of its own, and captions."""

import math

import numpy as np

from ...storage.arrays import Float32s, Float64s, Int64s
from ...storage.kernels import kernel
from ..rng import GOLDEN, fold, uniform

# Index of each random number of a view's key. The crop uses five per attempt.
_ATTEMPTS = 10
FLIP, _AREA, _RATIO, _TOP, _LEFT = 0, 1, 2, 3, 4
_DRAWS = 5
_JITTER, _GRAYSCALE, BLUR, SIGMA, SOLARISE, _STRENGTH = 64, 65, 66, 67, 68, 70
_ROTATION, _SHEAR, _ZOOM, _SHIFT_X, _SHIFT_Y, NOISE, NOISE_KEY = 80, 81, 82, 83, 84, 85, 86

_LUMA = np.array([0.299, 0.587, 0.114])
"""ITU-R BT.601, like Pillow's grey."""
_TO_YIQ = np.array([_LUMA, [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_FROM_YIQ = np.linalg.inv(_TO_YIQ)
_NOT_A_VIEW = np.uint64(1 << 32)
"""Replaces a view's number in the key, so that the caption does not depend on the crop."""


@kernel()
def view_key(seed: np.uint64, epoch: np.uint64, sample_id: np.uint64, view: np.uint64) -> np.uint64:
    """Return the key of all random numbers in one view."""
    return fold(fold(fold(fold(GOLDEN, seed), epoch), sample_id), view)


@kernel()
def crop_box(
    key: np.uint64, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of a random resized crop, in pixels, within height × width.

    Tries ten areas and aspect ratios, then takes the largest central crop of an allowed aspect ratio:
    Szegedy et al. 2015, as torchvision's RandomResizedCrop does it.
    """
    for attempt in range(_ATTEMPTS):
        draw = np.uint64(attempt * _DRAWS)
        area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform(key, draw + np.uint64(_AREA)))
        low, high = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(low + (high - low) * uniform(key, draw + np.uint64(_RATIO)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(uniform(key, draw + np.uint64(_TOP)) * (height - h + 1))
            left = int(uniform(key, draw + np.uint64(_LEFT)) * (width - w + 1))
            return top, left, h, w
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    return (height - h) // 2, (width - w) // 2, h, w


@kernel()
def draw_affine(
    key: np.uint64, affine: tuple[float, float, float], zoom: tuple[float, float], matrix: Float32s
) -> None:
    """Fill ViewParameters.affine of one view: the inverse of zoom, shear along x, rotation and shift, in this order.

    affine: largest angles of rotation and shear, in radians, and largest shift, in sides of the view.
    """
    angle, lean = affine[0] * either_way(key, _ROTATION), math.tan(affine[1] * either_way(key, _SHEAR))
    x, y = affine[2] * either_way(key, _SHIFT_X), affine[2] * either_way(key, _SHIFT_Y)
    cos, sin, larger = math.cos(angle), math.sin(angle), between(zoom, key, _ZOOM)
    turned = ((cos + lean * sin, sin - lean * cos), (-sin, cos))
    for row in range(2):
        across, down = turned[row][0] / larger, turned[row][1] / larger
        matrix[row, 0], matrix[row, 1], matrix[row, 2] = across, down, -across * x - down * y


@kernel()
def draw_colour(
    key: np.uint64,
    jitter: float,
    strengths: tuple[float, float, float, float],
    grayscale: float,
    matrix: Float32s,
    of_mean: Float32s,
) -> None:
    """Fill M and K (ViewParameters.colour and .colour_mean) of one view.

    The operations are torchvision's ColorJitter and RandomGrayscale with two differences: values are clamped once, at
    the end, and hue rotates the I-Q plane of YIQ instead of HSV's hue. Saturation and hue then preserve greys and luma,
    and the result does not depend on the order of the four operations, so no order is drawn.
    """
    factors = np.ones(3)
    angle = 0.0
    if uniform(key, np.uint64(_JITTER)) < jitter:
        for operation in range(3):
            factors[operation] = max(0.0, 1 + strengths[operation] * either_way(key, _STRENGTH + operation))
        angle = 2 * math.pi * strengths[3] * either_way(key, _STRENGTH + 3)
    brightness, contrast = factors[0], factors[1]
    saturation = 0.0 if uniform(key, np.uint64(_GRAYSCALE)) < grayscale else factors[2]
    turned = _hue_matrix(angle)
    for row in range(3):
        for column in range(3):
            coloured = saturation * turned[row, column] + (1 - saturation) * _LUMA[column]
            matrix[row, column] = brightness * contrast * coloured
            of_mean[row, column] = brightness * (1 - contrast) * _LUMA[column]


@kernel(inline="always")  # like the next, it would be compiled once for each draw
def between(ends: tuple[float, float], key: np.uint64, draw: int) -> float:
    low, high = ends
    return low + (high - low) * uniform(key, np.uint64(draw))


@kernel(inline="always")
def either_way(key: np.uint64, draw: int) -> float:
    """Return a number in [-1, 1)."""
    return 2 * uniform(key, np.uint64(draw)) - 1


@kernel()
def _hue_matrix(angle: float) -> Float64s:
    """Return the rotation of hue by an angle in radians; positive from red towards yellow."""
    cos, sin = math.cos(angle), math.sin(angle)
    turn = np.array([[1.0, 0.0, 0.0], [0.0, cos, sin], [0.0, -sin, cos]])
    matrix = np.zeros((3, 3))
    for row in range(3):
        for column in range(3):
            for i in range(3):
                for q in range(3):
                    matrix[row, column] += _FROM_YIQ[row, i] * turn[i, q] * _TO_YIQ[q, column]
    return matrix


def draw_captions(seed: np.uint64, epoch: np.uint64, sample_ids: Int64s, captions: Int64s) -> Int64s:
    """Return the caption drawn for each sample in this epoch, int64 [b] in 0 … captions - 1, all equally likely.

    captions: number of captions of each sample, int64 [b], at least 1.
    """
    return (draw_numbers(seed, epoch, sample_ids, _NOT_A_VIEW, 0) * captions).astype(np.int64)


@kernel()
def draw_numbers(seed: np.uint64, epoch: np.uint64, sample_ids: Int64s, view: np.uint64, draw: int) -> Float64s:
    """Return a random number of each sample, float64 [b] in [0, 1).

    view: the view's number, or for a draw that is of no view, one above all of theirs.
    """
    drawn = np.empty(len(sample_ids))
    for i in range(len(sample_ids)):
        drawn[i] = uniform(view_key(seed, epoch, np.uint64(sample_ids[i]), view), np.uint64(draw))
    return drawn
