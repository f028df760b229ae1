"""Augmentation: every random choice in a view is a function of (seed, epoch, sample_id, view), in both loaders.

A view is: crop and resize, flip, colour, clamp, blur, solarise, normalise. All colour operations are linear in the
pixel and in the mean of the crop, so a sample's colour jitter is one pair of 3×3 matrices.
"""

import math
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, NonNegativeFloat, model_validator

from .rng import GOLDEN, compiled, fold, uniform

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class Recipe(BaseModel, frozen=True, extra="forbid"):
    """How a view is made. Pairs of probabilities are for the first and the second view."""

    scale: tuple[float, float] = (0.08, 1.0)
    """Range of a crop's share of the picture's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of a crop's width over height; drawn uniformly in its logarithm."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    jitter: float = Field(default=0.0, ge=0, le=1)
    """Probability of changing brightness, contrast, saturation and hue."""
    brightness: NonNegativeFloat = 0.0
    """A factor is drawn from 1 ± this, clipped at 0; likewise for the next two."""
    contrast: NonNegativeFloat = 0.0
    saturation: NonNegativeFloat = 0.0
    hue: float = Field(default=0.0, ge=0, le=0.5)
    """An angle is drawn from ± this, in turns."""
    grayscale: float = Field(default=0.0, ge=0, le=1)
    """Probability of converting to grey."""
    blur: tuple[float, float] = (0.0, 0.0)
    """Probability of a Gaussian blur."""
    sigma: tuple[float, float] = (0.1, 2.0)
    """Range of its standard deviation, in pixels of the view."""
    solarise: tuple[float, float] = (0.0, 0.0)
    """Probability of inverting all values of 128 or more."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Subtracted from each channel, with pixels in [0, 1]."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Divides each channel after the mean is subtracted."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {self.scale} is not 0 < from <= to <= 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio {self.ratio} is not 0 < from <= to")
        if not 0 < self.sigma[0] <= self.sigma[1]:
            raise ValueError(f"sigma {self.sigma} is not 0 < from <= to")
        if not all(0 <= share <= 1 for share in self.blur + self.solarise):
            raise ValueError(f"blur {self.blur} or solarise {self.solarise} is not a pair of probabilities")
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std} is not above 0 in every channel")
        return self

    @property
    def has_colour(self) -> bool:
        """Whether views can change colour."""
        strongest = max(self.brightness, self.contrast, self.saturation, self.hue)
        return self.grayscale > 0 or (self.jitter > 0 and strongest > 0)

    @property
    def has_blur(self) -> bool:
        return max(self.blur) > 0

    @property
    def has_solarise(self) -> bool:
        return max(self.solarise) > 0


RECIPES: dict[str, Recipe] = {
    # CLIP's own: Radford et al. 2021, and open_clip's default crop.
    "clip": Recipe(scale=(0.9, 1.0), flip=0.0, mean=CLIP_MEAN, std=CLIP_STD),
    # The geometric half of SimCLR's recipe.
    "crop_flip": Recipe(),
    # Chen et al. 2020, appendix A, at its strength of 1.
    "simclr": Recipe(
        jitter=0.8, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, grayscale=0.2, blur=(0.5, 0.5)
    ),
    # The same, appendix B.9: half the strength and no blur, for pictures of 32×32.
    "simclr_cifar": Recipe(jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grayscale=0.2),
    # Chen, Xie and He 2021 take BYOL's two distributions (Grill et al. 2020, appendix B, table 6).
    "moco_v3": Recipe(
        jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grayscale=0.2,
        blur=(1.0, 0.1), solarise=(0.0, 0.2),
    ),
    # Bardes, Ponce and LeCun 2022, appendix C.1: one distribution for both views.
    "vicreg": Recipe(
        jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grayscale=0.2,
        blur=(0.5, 0.5), solarise=(0.1, 0.1),
    ),
}  # fmt: skip


class ViewParameters(NamedTuple):
    """Random choices for one view of b samples."""

    box: NDArray[np.int64]
    """int64 [b, 4]: top, left, height, width of the crop, in pixels of the stored picture."""
    flip: NDArray[np.bool_]
    """bool [b]."""
    colour: NDArray[np.float32]
    """float32 [b, 3, 3], M: a pixel (R, G, B in 0 … 255) becomes M · pixel + K · mean, clamped to 0 … 255."""
    colour_mean: NDArray[np.float32]
    """float32 [b, 3, 3], K; mean is of the resized crop's channels."""
    blur: NDArray[np.float32]
    """float32 [b]: sigma in pixels of the view, 0 for none. The kernel is cut at ceil(3 sigma) pixels from its centre;
    the view is mirrored at its borders, without repeating the edge."""
    solarise: NDArray[np.bool_]
    """bool [b]: map values of 128 or more to 255 - value."""


def view_parameters(
    recipe: Recipe, seed: int, epoch: int, sample_ids: NDArray[np.int64],
    heights: NDArray[np.int64], widths: NDArray[np.int64], view: int,
) -> ViewParameters:  # fmt: skip
    """Draw the choices for one view of samples whose stored pictures have these heights and widths; all arrays [b]."""
    b = len(sample_ids)
    drawn = ViewParameters(
        np.empty((b, 4), np.int64), np.empty(b, np.bool_), np.empty((b, 3, 3), np.float32),
        np.empty((b, 3, 3), np.float32), np.empty(b, np.float32), np.empty(b, np.bool_),
    )  # fmt: skip
    chances = _Chances(
        recipe.scale, recipe.ratio, recipe.flip, recipe.jitter if recipe.has_colour else 0.0,
        (recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue), recipe.grayscale,
        recipe.blur[view], recipe.sigma, recipe.solarise[view],
    )  # fmt: skip
    _draw_views(drawn, chances, np.uint64(seed), np.uint64(epoch), sample_ids, heights, widths, np.uint64(view))
    return drawn


class _Chances(NamedTuple):
    """A recipe for one view, in a form that compiled code accepts."""

    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float
    jitter: float
    strengths: tuple[float, float, float, float]
    grayscale: float
    blur: float
    sigma: tuple[float, float]
    solarise: float


# Index of each random number of a view's key. The crop uses five per attempt.
_ATTEMPTS = 10
_FLIP, _AREA, _RATIO, _TOP, _LEFT = 0, 1, 2, 3, 4
_DRAWS = 5
_JITTER, _GRAYSCALE, _BLUR, _SIGMA, _SOLARISE, _STRENGTH = 64, 65, 66, 67, 68, 70

_LUMA = np.array([0.299, 0.587, 0.114])
"""ITU-R BT.601, like Pillow's grey."""
_TO_YIQ = np.array([_LUMA, [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_FROM_YIQ = np.linalg.inv(_TO_YIQ)


@compiled
def view_key(seed: np.uint64, epoch: np.uint64, sample_id: np.uint64, view: np.uint64) -> np.uint64:
    """Return the key of all random numbers in one view."""
    return fold(fold(fold(fold(GOLDEN, seed), epoch), sample_id), view)


@compiled
def _draw_views(
    drawn: ViewParameters, chances: _Chances, seed: np.uint64, epoch: np.uint64, sample_ids: NDArray[np.int64],
    heights: NDArray[np.int64], widths: NDArray[np.int64], view: np.uint64,
) -> None:  # fmt: skip
    for i in range(len(sample_ids)):
        key = view_key(seed, epoch, np.uint64(sample_ids[i]), view)
        box = crop_box(key, heights[i], widths[i], chances.scale, chances.ratio)
        for side in range(4):
            drawn.box[i, side] = box[side]
        drawn.flip[i] = uniform(key, np.uint64(_FLIP)) < chances.flip
        draw_colour(key, chances.jitter, chances.strengths, chances.grayscale, drawn.colour[i], drawn.colour_mean[i])
        low, high = chances.sigma
        blurred = uniform(key, np.uint64(_BLUR)) < chances.blur
        drawn.blur[i] = low + (high - low) * uniform(key, np.uint64(_SIGMA)) if blurred else 0.0
        drawn.solarise[i] = uniform(key, np.uint64(_SOLARISE)) < chances.solarise


@compiled
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


@compiled
def draw_colour(
    key: np.uint64, jitter: float, strengths: tuple[float, float, float, float], grayscale: float,
    matrix: NDArray[np.float32], of_mean: NDArray[np.float32],
) -> None:  # fmt: skip
    """Fill M and K (ViewParameters.colour and .colour_mean) of one view.

    The operations are torchvision's ColorJitter and RandomGrayscale with two differences: values are clamped once, at
    the end, and hue rotates the I-Q plane of YIQ instead of HSV's hue. Saturation and hue then preserve greys and luma,
    and the result does not depend on the order of the four operations, so no order is drawn.
    """
    factors = np.ones(3)
    angle = 0.0
    if uniform(key, np.uint64(_JITTER)) < jitter:
        for operation in range(3):
            factors[operation] = max(0.0, 1 + strengths[operation] * _either_way(key, _STRENGTH + operation))
        angle = 2 * math.pi * strengths[3] * _either_way(key, _STRENGTH + 3)
    brightness, contrast = factors[0], factors[1]
    saturation = 0.0 if uniform(key, np.uint64(_GRAYSCALE)) < grayscale else factors[2]
    turned = _hue_matrix(angle)
    for row in range(3):
        for column in range(3):
            coloured = saturation * turned[row, column] + (1 - saturation) * _LUMA[column]
            matrix[row, column] = brightness * contrast * coloured
            of_mean[row, column] = brightness * (1 - contrast) * _LUMA[column]


@compiled
def _either_way(key: np.uint64, draw: int) -> float:
    """Return a number in [-1, 1)."""
    return 2 * uniform(key, np.uint64(draw)) - 1


@compiled
def _hue_matrix(angle: float) -> NDArray[np.float64]:
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
