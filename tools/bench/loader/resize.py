"""How near our resize comes to Pillow's antialiased one, over the boxes that the recipe draws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ....pipeline.augment import RECIPES, view_parameters
from ....pipeline.loading.ffcv_loader import FFCVLoader
from ..figure import Figure
from ..measured import Measured
from ..photographs import HEIGHT, WIDTH
from ..progress import counted
from .material import Material, prepare
from .pillow_views import cropped
from .sizes import ResizeSizes

# What the loader hands over is then the crop itself, in 0 … 1.
_CROP = RECIPES["crop_flip"].model_copy(update={"flip": 0.0, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})


def measure(sizes: ResizeSizes, directory: Path) -> Measured:
    """Decode and crop with the loader and with Pillow, and compare."""
    material = prepare(directory, sizes.images, min(sizes.images, 64))
    decibels = np.concatenate(list(_decibels(material, sizes)))
    return Measured(
        f"{len(decibels):,} crops of {sizes.images} photographs to {sizes.image_size}×{sizes.image_size}, "
        f"the boxes those of RandomResizedCrop: {_CROP.scale[0]}–{_CROP.scale[1]} of the area",
        "Pillow's resize(box=…, BILINEAR), which is antialiased",
        (
            Figure("psnr_db", "PSNR against Pillow's, mean", "dB", float(decibels.mean()), at_least=36),
            Figure("psnr_db_1_percent", "the same, first percentile", "dB", float(np.percentile(decibels, 1))),
            Figure("psnr_db_least", "the same, least", "dB", float(decibels.min())),
        ),
    )


def _decibels(material: Material, sizes: ResizeSizes) -> Iterator[NDArray[np.float64]]:
    """PSNR of every crop, float64 [images] for each epoch."""
    ids = np.arange(sizes.images)
    heights, widths = np.full(len(ids), HEIGHT), np.full(len(ids), WIDTH)
    pictures = [Image.open(file).convert("RGB") for file in material.files]
    with FFCVLoader.open(
        material.dataset, material.order, recipe=_CROP, image_size=sizes.image_size, views=1
    ) as loader:  # fmt: skip
        for epoch in counted("resize", sizes.epochs):
            ours = 255 * loader.make(ids, epoch).views[0].numpy()
            boxes = view_parameters(_CROP, material.order.seed, epoch, ids, heights, widths, 0).box
            theirs = [
                np.asarray(cropped(picture, box, sizes.image_size), np.float32)
                for picture, box in zip(pictures, boxes, strict=True)
            ]
            yield psnr(ours, np.stack(theirs).transpose(0, 3, 1, 2))


def psnr(views: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float64]:
    """Decibels, float64 [b], of views [b, 3, H, W] with values 0 … 255; 99 at most, where they are all but equal."""
    squares: NDArray[np.float64] = np.square(views.astype(np.float64) - others).mean((1, 2, 3))
    return 10 * np.log10(255**2 / np.maximum(squares, 255**2 / 10**9.9))
