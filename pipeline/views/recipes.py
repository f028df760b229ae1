"""Augmentation: every random choice in a view is a function of (seed, epoch, sample_id, view), in both loaders.

A view is: crop and resize, flip, affine map, colour, clamp, blur, solarise, noise, clamp, normalise. All colour
operations are linear in the pixel and in the mean of the crop, so a sample's colour jitter is one pair of 3×3 matrices.
"""

import math
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from ...storage.arrays import Bools, Float32s, Int64s, Uint64s
from ...storage.kernels import kernel
from ..rng import fold, uniform
from .draws import BLUR, FLIP, NOISE, NOISE_KEY, SIGMA, SOLARISE, between, crop_box, draw_affine, draw_colour, view_key

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def _twice(value: Any) -> Any:
    return (value, value) if isinstance(value, int | float) else value


Share = Annotated[float, Field(ge=0, le=1)]
Pair = Annotated[tuple[float, float], BeforeValidator(_twice)]
Shares = Annotated[tuple[Share, Share], BeforeValidator(_twice)]


class Recipe(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The recipe of a view. A pair of probabilities is for the first and the second view; local views alternate.

    A single number stands for both.
    """

    scale: Pair = (0.08, 1.0)
    """Range of a crop's area as a share of the picture's."""
    local_scale: Pair = (0.05, 0.14)
    """The same for local views; from SwAV (Caron et al. 2020, `min_scale_crops` in its code). DINO uses 0.05 … 0.4."""
    ratio: Pair = (3 / 4, 4 / 3)
    """Range of a crop's aspect ratio, width over height; drawn log-uniformly."""
    flip: Share = 0.5
    """Probability of a horizontal flip."""
    rotation: NonNegativeFloat = 0.0
    """Degrees: the affine map's rotation is drawn from ± this; the shear below likewise."""
    shear: float = Field(default=0.0, ge=0, lt=90)
    """Angle in degrees by which vertical lines lean."""
    zoom: Pair = (1.0, 1.0)
    """Range of the affine map's magnification."""
    shift: NonNegativeFloat = 0.0
    """The affine map's shift on each axis is drawn from ± this share of the view's side."""
    jitter: Share = 0.0
    """Probability of changing brightness, contrast, saturation and hue."""
    brightness: NonNegativeFloat = 0.0
    """A factor is drawn from 1 ± this, clipped at 0; likewise for the next two."""
    contrast: NonNegativeFloat = 0.0
    saturation: NonNegativeFloat = 0.0
    hue: float = Field(default=0.0, ge=0, le=0.5)
    """Hue angle, in turns, drawn from ± this."""
    grayscale: Share = 0.0
    """Probability of converting to grey."""
    blur: Shares = (0.0, 0.0)
    """Probability of a Gaussian blur."""
    sigma: Pair = (0.1, 2.0)
    """Range of the blur's standard deviation, in pixels of the view."""
    solarise: Shares = (0.0, 0.0)
    """Probability of inverting all values of 128 or more."""
    noise: Pair = (0.0, 0.0)
    """Range of the standard deviation of the noise added to each value, in levels of 255."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Mean subtracted from each channel, with pixels in [0, 1]."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = IMAGENET_STD
    """Divisor of each channel after the mean is subtracted."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for name in ("scale", "local_scale"):
            if not 0 < getattr(self, name)[0] <= getattr(self, name)[1] <= 1:
                raise ValueError(f"{name} {getattr(self, name)} is not 0 < from <= to <= 1")
        for name in ("ratio", "zoom", "sigma"):
            if not 0 < getattr(self, name)[0] <= getattr(self, name)[1]:
                raise ValueError(f"{name} {getattr(self, name)} is not 0 < from <= to")
        if not 0 <= self.noise[0] <= self.noise[1]:
            raise ValueError(f"noise {self.noise} is not 0 <= from <= to")
        return self

    @property
    def has_affine(self) -> bool:
        return max(self.rotation, self.shear, self.shift) > 0 or self.zoom != (1.0, 1.0)

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

    @property
    def has_noise(self) -> bool:
        return self.noise[1] > 0


_BYOL: Any = {"jitter": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1, "grayscale": 0.2}
RECIPES: dict[str, Recipe] = {
    # CLIP's own: Radford et al. 2021, and open_clip's default crop.
    "clip": Recipe(scale=(0.9, 1.0), flip=0.0, mean=CLIP_MEAN, std=CLIP_STD),
    # The geometric half of SimCLR's recipe.
    "crop_flip": Recipe(),
    # Chen et al. 2020, appendix A, at its strength of 1.
    "simclr": Recipe(jitter=0.8, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, grayscale=0.2, blur=(0.5, 0.5)),
    # The same paper, appendix B.9: half the strength and no blur, for pictures of 32×32.
    "simclr_cifar": Recipe(jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grayscale=0.2),
    # Chen, Xie and He 2021 take BYOL's two distributions (Grill et al. 2020, appendix B, table 6).
    "moco_v3": Recipe(**_BYOL, blur=(1.0, 0.1), solarise=(0.0, 0.2)),
    # Bardes, Ponce and LeCun 2022, appendix C.1: one distribution for both views.
    "vicreg": Recipe(**_BYOL, blur=(0.5, 0.5), solarise=(0.1, 0.1)),
    # For characters, which mirroring or cutting turns into others. Glyphs differ by ±15°, ±3 of 32 pixels, 18 to 26
    # points and noise of 12 levels; views by as much again. Without brightness, SimCLR's k-NN fell from 48.5 to 44.5 %;
    # noise up to 12 or 40 levels made no difference. A local view keeps a readable part.
    "glyphs": Recipe(
        scale=(1.0, 1.0),
        local_scale=(0.3, 0.6),
        flip=0.0,
        rotation=20,
        shear=10,
        zoom=(0.8, 1.2),
        shift=0.1,
        jitter=1.0,
        brightness=0.4,
        contrast=0.4,
        noise=(0.0, 25.0),
        mean=CLIP_MEAN,
        std=CLIP_STD,
    ),
}


class ViewParameters(NamedTuple):
    """Random choices for one view of b samples."""

    box: Int64s
    """int64 [b, 4]: top, left, height, width of the crop, in pixels of the stored picture."""
    flip: Bools
    """bool [b]."""
    affine: Float32s
    """float32 [b, 2, 3]: place (x, y) of the view shows place affine · (x, y, 1) of the crop, interpolated bilinearly;
    both are relative to the centre, in sides of the view. The crop's edge is repeated beyond its border."""
    colour: Float32s
    """float32 [b, 3, 3], M: a pixel (R, G, B in 0 … 255) becomes M · pixel + K · mean, clamped to 0 … 255."""
    colour_mean: Float32s
    """float32 [b, 3, 3], K; mean is of the resized crop's channels."""
    blur: Float32s
    """float32 [b]: sigma in pixels of the view, 0 for none. The kernel is cut at ceil(3 sigma) pixels from its centre;
    the view is mirrored at its borders, without repeating the edge."""
    solarise: Bools
    """bool [b]: map values of 128 or more to 255 - value."""
    noise: Float32s
    """float32 [b]: standard deviation in levels of 255, 0 for none."""
    noise_key: Uint64s
    """uint64 [b]: value (channel, y, x) gets `nearly_normal(noise_key, (channel · side + y) · side + x)` × noise."""


FIRST_LOCAL = 2
"""Number of the first local view; global views are 0 and 1."""


def sides_of_views(image_size: int, views: int, local_size: int, local_views: int) -> dict[int, int]:
    """Return view number → side in pixels for a sample's views; global views come first."""
    local = range(FIRST_LOCAL, FIRST_LOCAL + local_views)
    return dict.fromkeys(range(views), image_size) | dict.fromkeys(local, local_size)


def view_parameters(
    recipe: Recipe, seed: int, epoch: int, sample_ids: Int64s, heights: Int64s, widths: Int64s, view: int
) -> ViewParameters:
    """Draw the choices for one view of samples whose stored pictures have these heights and widths; all arrays [b].

    view: 0 or 1 for a global view, FIRST_LOCAL or more for a local view.
    """
    b = len(sample_ids)
    drawn = ViewParameters(
        np.empty((b, 4), np.int64),
        np.empty(b, np.bool_),
        np.empty((b, 2, 3), np.float32),
        np.empty((b, 3, 3), np.float32),
        np.empty((b, 3, 3), np.float32),
        np.empty(b, np.float32),
        np.empty(b, np.bool_),
        np.empty(b, np.float32),
        np.empty(b, np.uint64),
    )
    chances = _Chances(
        recipe.scale if view < FIRST_LOCAL else recipe.local_scale,
        recipe.ratio,
        recipe.flip,
        (math.radians(recipe.rotation), math.radians(recipe.shear), recipe.shift),
        recipe.zoom,
        recipe.jitter if recipe.has_colour else 0.0,
        (recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue),
        recipe.grayscale,
        recipe.blur[view % 2],
        recipe.sigma,
        recipe.solarise[view % 2],
        recipe.noise,
    )
    _draw_views(drawn, chances, np.uint64(seed), np.uint64(epoch), sample_ids, heights, widths, np.uint64(view))
    return drawn


class _Chances(NamedTuple):
    """A recipe for one view, in a form that compiled code accepts."""

    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float
    affine: tuple[float, float, float]
    zoom: tuple[float, float]
    jitter: float
    strengths: tuple[float, float, float, float]
    grayscale: float
    blur: float
    sigma: tuple[float, float]
    solarise: float
    noise: tuple[float, float]


@kernel()
def _draw_views(
    drawn: ViewParameters,
    chances: _Chances,
    seed: np.uint64,
    epoch: np.uint64,
    sample_ids: Int64s,
    heights: Int64s,
    widths: Int64s,
    view: np.uint64,
) -> None:
    for i in range(len(sample_ids)):
        key = view_key(seed, epoch, np.uint64(sample_ids[i]), view)
        box = crop_box(key, heights[i], widths[i], chances.scale, chances.ratio)
        for side in range(4):
            drawn.box[i, side] = box[side]
        drawn.flip[i] = uniform(key, np.uint64(FLIP)) < chances.flip
        draw_affine(key, chances.affine, chances.zoom, drawn.affine[i])
        draw_colour(key, chances.jitter, chances.strengths, chances.grayscale, drawn.colour[i], drawn.colour_mean[i])
        blurred = uniform(key, np.uint64(BLUR)) < chances.blur
        drawn.blur[i] = between(chances.sigma, key, SIGMA) if blurred else 0.0
        drawn.solarise[i] = uniform(key, np.uint64(SOLARISE)) < chances.solarise
        drawn.noise[i] = between(chances.noise, key, NOISE)
        drawn.noise_key[i] = fold(key, np.uint64(NOISE_KEY))
