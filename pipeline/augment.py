"""Augmentation of a view: which part of the picture, and whether mirrored, as a function of (seed, epoch, id, view)."""

import math
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator

from .keyed import GOLDEN, compiled, fold, uniform

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class Recipe(BaseModel, frozen=True, extra="forbid"):
    """How a view is made: random resized crop, flip, normalise."""

    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the picture's area that a crop may have, from and to."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height of a crop, from and to; drawn uniformly in its logarithm."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """Probability of mirroring left and right."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Subtracted from each channel, with pixels in [0, 1]."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Divides each channel after that."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale {self.scale} is not 0 < from <= to <= 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio {self.ratio} is not 0 < from <= to")
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std} is not above 0 in every channel")
        return self


RECIPES: dict[str, Recipe] = {
    # CLIP's own: Radford et al. 2021, and open_clip's default crop.
    "clip": Recipe(scale=(0.9, 1.0), flip=0.0, mean=CLIP_MEAN, std=CLIP_STD),
    # The geometric half of SimCLR's recipe (Chen et al. 2020, appendix A).
    "crop_flip": Recipe(),
}

_ATTEMPTS = 10
_FLIP, _AREA, _RATIO, _TOP, _LEFT = 0, 1, 2, 3, 4
_DRAWS = 5


@compiled
def view_key(seed: np.uint64, epoch: np.uint64, sample_id: np.uint64, view: np.uint64) -> np.uint64:
    """The key of all randomness in one view."""
    return fold(fold(fold(fold(GOLDEN, seed), epoch), sample_id), view)


@compiled
def is_flipped(key: np.uint64, probability: float) -> bool:
    return uniform(key, np.uint64(_FLIP)) < probability


@compiled
def crop_box(
    key: np.uint64, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random resized crop, in pixels, inside height × width.

    Ten attempts at an area and an aspect ratio that fit, then the largest central crop of an allowed aspect ratio:
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
def normalise_into(
    out: NDArray[np.float32],
    pixels: NDArray[np.uint8],
    flipped: bool,
    gain: NDArray[np.float32],
    offset: NDArray[np.float32],
) -> None:
    """out[c, y, x] = pixels[y, x, c] · gain[c] + offset[c], mirrored where flipped. out float32 [3, H, W]."""
    height, width, channels = pixels.shape
    for y in range(height):
        for x in range(width):
            source = width - 1 - x if flipped else x
            for c in range(channels):
                out[c, y, x] = np.float32(pixels[y, source, c]) * gain[c] + offset[c]
