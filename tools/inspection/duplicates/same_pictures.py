"""Which pictures are the same: exact copies, pictures of one colour, and pairs that agree once they are aligned.

Copies are stored JPEGs with the same bytes. Pairs are compared up to a scale of a few per cent, a shift, brightness,
contrast and encoding, as 32×32 grey levels, smoothed so that what JPEG loses at another quality does not count. One is
warped onto the other by Gauss-Newton, which fits scale, shift, gain and offset; after the smoothing it needs no search.
"""

import hashlib
from io import BytesIO
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ....pipeline.loading import Closing
from ....pipeline.opening import Dataset
from .. import Bools, Float32s, Int64s, OnDone, silent
from .similar_pairs import SimilarPairs

_BLANK_BYTES, _PIXELS_A_BYTE = 4096, 16
"""A larger JPEG, by a byte for so many pixels, is not of one colour, or full of metadata: it is not decoded."""
_BLANK_RANGE = 2
"""Levels of 255 between the darkest and the lightest pixel of one colour."""
_PAIRS_AT_ONCE, _PICTURES_AT_ONCE = 256, 512
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


def exact_copies(dataset: Dataset, on_progress: OnDone = silent) -> tuple[Int64s, Int64s]:
    """Return the samples that repeat an earlier one, ascending, and the first sample with these bytes, int64 [k] each.

    The checksums of the JPEGs are compared in memory, 40 bytes per sample; where two are equal, the pictures are read
    and their sha256 compared, since a checksum can be forged or collide. on_progress: called with the records read.
    Raises DatasetError, OSError.
    """
    _, places, counts = np.unique(checksums(dataset, on_progress), return_inverse=True, return_counts=True)
    first_with, found = dict[bytes, int](), list[tuple[int, int]]()
    for sample_id in np.flatnonzero(counts[places] > 1).tolist():
        digest = hashlib.sha256(dataset.jpeg(sample_id)).digest()
        if (original := first_with.setdefault(digest, sample_id)) != sample_id:
            found.append((sample_id, original))
    copies, originals = np.array(found, np.int64).reshape(-1, 2).T
    return copies, originals


def checksums(dataset: Dataset, on_progress: OnDone = silent) -> NDArray[np.uint64]:
    """Return the checksums of all samples' JPEGs, uint64 [n]. on_progress: called with the records read."""
    found = np.empty(dataset.n, np.uint64)
    for number, (first, stop) in enumerate(pairwise(dataset.first_id.tolist())):
        found[first:stop] = dataset.records(number)["jpeg_checksum"]
        on_progress(stop, dataset.n)
    return found


def blank_pictures(dataset: Dataset, on_progress: OnDone = silent) -> Int64s:
    """Return the samples whose picture has one colour, ascending, int64 [k]. Raises DatasetError, OSError.

    on_progress: called with the samples done.
    """
    found = []
    for number, first in enumerate(dataset.first_id[:-1].tolist()):
        records = dataset.records(number)
        area = records["height"].astype(np.int64) * records["width"]
        small = np.flatnonzero(records["jpeg_bytes"] <= _BLANK_BYTES + area // _PIXELS_A_BYTE)
        for sample_id in (first + small).tolist():
            jpeg = dataset.jpeg(sample_id)
            # The draft lets the decoder skip detail, which may be a thin or small drawing.
            if _has_one_colour(jpeg, draft=True) and _has_one_colour(jpeg):
                found.append(sample_id)
            on_progress(sample_id, dataset.n)
        on_progress(first + len(records), dataset.n)
    return np.array(found, np.int64)


def _has_one_colour(jpeg: bytes, *, draft: bool = False) -> bool:
    with Image.open(BytesIO(jpeg), formats=["JPEG"]) as picture:
        if draft:
            picture.draft("RGB", (64, 64))
        return bool(np.ptp(np.asarray(picture.convert("RGB")), axis=(0, 1)).max() <= _BLANK_RANGE)


class Agreement(NamedTuple):
    """How well pairs of pictures agree once aligned."""

    correlation: Float32s
    """float32 [p]: normalised correlation of the grey levels; 0 if a picture is of one colour."""
    difference: Float32s
    """float32 [p]: root mean squared difference in grey levels; infinite if a picture is of one colour."""

    @property
    def same(self) -> Bools:
        return (self.correlation >= MIN_CORRELATION) & (self.difference <= MAX_DIFFERENCE)

    def of(self, which: NDArray[Any]) -> Self:
        """Return chosen pairs, by a mask or by indices."""
        return self._replace(correlation=self.correlation[which], difference=self.difference[which])


def prepare(pictures: Float32s) -> Float32s:
    """Return the smoothed grey levels, float32 [m, 32, 32], of pictures, float32 [m, 3, 32, 32] in 0 … 255."""
    from scipy.ndimage import gaussian_filter  # late, as few inspections need it

    grey = np.tensordot(pictures, _GREY, axes=(1, 0))
    return np.asarray(gaussian_filter(grey, (0, SMOOTHING, SMOOTHING)), np.float32)


class Thumbnails(Closing):
    """Decodes the pictures of pairs: the largest central square, reduced to what `agreement` compares."""

    def __init__(self, dataset: Dataset) -> None:
        from ....pipeline.loading.ffcv_loader import ViewMaker
        from ....pipeline.views.recipes import Recipe

        plain = Recipe(scale=(1, 1), ratio=(1, 1), flip=0, mean=(0, 0, 0), std=(1 / 255,) * 3)
        self._maker = ViewMaker(dataset, recipe=plain, image_size=EDGE, views=1)

    def compared(self, pairs: SimilarPairs) -> Agreement:
        """Return how well the pictures of pairs agree. Raises DatasetError for a picture that does not decode."""
        found = [Agreement(*np.empty((2, 0), np.float32))]
        for start in range(0, len(pairs.first), _PAIRS_AT_ONCE):
            ends = np.concatenate([of[start : start + _PAIRS_AT_ONCE] for of in pairs[:2]])
            ids, places = np.unique(ends, return_inverse=True)
            first, second = np.split(self.prepared(ids)[places], 2)
            found.append(agreement(first, second))
        return Agreement(*map(np.concatenate, zip(*found, strict=True)))

    def prepared(self, sample_ids: Int64s, on_progress: OnDone = silent) -> Float32s:
        """Return the prepared pictures of m samples, float32 [m, 32, 32]. Raises as `compared`."""
        pictures = np.empty((len(sample_ids), EDGE, EDGE), np.float32)
        for first in range(0, len(sample_ids), _PICTURES_AT_ONCE):
            here = slice(first, first + _PICTURES_AT_ONCE)
            pictures[here] = prepare(self._maker.make(sample_ids[here], epoch=0).views[0].numpy())
            on_progress(min(first + _PICTURES_AT_ONCE, len(sample_ids)), len(sample_ids))
        return pictures

    def close(self) -> None:
        self._maker.close()


def agreement(first: Float32s, second: Float32s) -> Agreement:
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


def _compare(first: Float32s, second: Float32s) -> Agreement:
    first, second = first - first.mean(1, keepdims=True), second - second.mean(1, keepdims=True)
    spreads = np.sqrt((first**2).mean(1)), np.sqrt((second**2).mean(1))
    product, flat = spreads[0] * spreads[1], np.minimum(*spreads) < 1e-3
    correlation = np.where(flat, 0, (first * second).mean(1) / np.where(flat, 1, product))
    # What is left of the one with more contrast after the best gain and offset.
    difference = np.maximum(*spreads) * np.sqrt(np.maximum(1 - correlation**2, 0))
    return Agreement(correlation.astype(np.float32), np.where(flat, np.inf, difference).astype(np.float32))


def _warp(sources: tuple[Float32s, ...], scale: Float32s, shift: Float32s) -> list[Float32s]:
    """Sample each of `sources`, [p, 32, 32], at centre + (window - centre) * scale + shift; [p, 26, 26] each."""
    rows, columns = (_weights(scale, shift[:, axis]) for axis in (0, 1))
    return [np.asarray(rows @ source @ columns.transpose(0, 2, 1), np.float32) for source in sources]


def _weights(scale: Float32s, shift: Float32s) -> Float32s:
    """Return the weights of cubic convolution along one axis, float32 [p, 26, 32]; rows add up to 1.

    Source: Keys, Cubic convolution interpolation for digital image processing, 1981; a = -1/2.
    """
    at = np.clip(np.float32(_CENTRE) + _WINDOW * scale[:, None] + shift[:, None], 0, EDGE - 1)
    t = np.abs(at[:, :, None] - np.arange(EDGE, dtype=np.float32))
    near, far = (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2
    weights = np.where(t <= 1, near, np.where(t < 2, far, 0))
    return np.asarray(weights / weights.sum(2, keepdims=True), np.float32)
