"""Photographs to measure with: crops of two real ones, recoloured and mirrored so that no two are equal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...pipeline.cores import cores

HEIGHT, WIDTH = 300, 400
QUALITY = 90
_GAIN = (0.75, 1.1)
"""A channel is multiplied by a number from this range."""
_AT_ONCE = 256


def jpegs(count: int) -> Iterator[bytes]:
    """`count` different JPEG files of HEIGHT × WIDTH, the same ones at every call."""
    from sklearn.datasets import load_sample_images

    originals = load_sample_images().images  # of 427 × 640 pixels: a flower, and a temple
    numbers = iter(range(count))
    with ThreadPoolExecutor(cores()) as pool:
        while some := list(islice(numbers, _AT_ONCE)):
            yield from pool.map(lambda number: _jpeg(originals[number % len(originals)], number), some)


def _jpeg(original: NDArray[np.uint8], number: int) -> bytes:
    random = np.random.default_rng(number)
    top, left = random.integers((original.shape[0] - HEIGHT + 1, original.shape[1] - WIDTH + 1)).tolist()
    picture = original[top : top + HEIGHT, left : left + WIDTH]
    if random.random() < 0.5:
        picture = picture[:, ::-1]
    recoloured = np.clip(picture * random.uniform(*_GAIN, size=3), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(recoloured).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
