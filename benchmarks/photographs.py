"""Photographs to measure loaders with: generated, the same each time."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.cores import cores
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.folder import FolderSource

HEIGHT, WIDTH = 300, 400
"""Size of the generated photographs, in pixels."""
QUALITY = 90


def photographs(directory: Path, images: int) -> Dataset:
    """Write photographs to `directory`/files and convert them to `directory`/dataset, kept byte for byte."""
    folder = directory / "files"
    folder.mkdir()
    for number, jpeg in enumerate(jpegs(images)):
        (folder / f"{number:06d}.jpg").write_bytes(jpeg)
    convert(FolderSource(folder), directory / "dataset", ConvertSettings())
    return Dataset(directory / "dataset")


def jpegs(count: int) -> Iterator[bytes]:
    """Yield `count` different JPEG files of HEIGHT × WIDTH, the same each time: recoloured crops of two photographs."""
    from sklearn.datasets import load_sample_images

    originals = load_sample_images().images  # of 427 × 640 pixels: a flower, and a temple
    numbers = iter(range(count))
    with ThreadPoolExecutor(cores()) as pool:
        while some := list(islice(numbers, 256)):
            yield from pool.map(lambda number: _jpeg(originals[number % len(originals)], number), some)


def _jpeg(original: NDArray[np.uint8], number: int) -> bytes:
    random = np.random.default_rng(number)
    top, left = random.integers((original.shape[0] - HEIGHT + 1, original.shape[1] - WIDTH + 1)).tolist()
    picture = original[top : top + HEIGHT, left : left + WIDTH]
    if random.random() < 0.5:
        picture = picture[:, ::-1]
    recoloured = np.clip(picture * random.uniform(0.75, 1.1, size=3), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(recoloured).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
