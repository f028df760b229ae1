"""Settings that are chosen from the dataset unless they are given, and what is said of each choice."""

from __future__ import annotations

import numpy as np
import torch

from ...pipeline.dataset import Dataset
from ..config import ModelConfig, TrainConfig
from ..errors import ConfigError
from .selection_files import rows_of

LOOKED_AT = 4096
"""Samples whose pictures' sizes are read; ids are in random order."""
SIDES = range(32, 225, 16)
"""Side lengths of views that are chosen, in pixels."""
USUAL_BATCH_SIZE = 256
LARGEST_FOR_BUILT_IN = 64
"""Side length of views, in pixels, up to which the built-in encoders are chosen."""
NAMED = {
    "image": "`--set model.image.name=hf:resnet-18` (11 million parameters, 1.8 GFLOP for a picture of 224 pixels), or "
    "hf:resnet-50 (24 million, 4.1 GFLOP)",
    "text": "`--set model.text.name=hf:clip-text` (12 layers)",
}


def shorter_side(dataset: Dataset) -> int:
    """Return the median shorter side of the stored pictures, in pixels. Raises DatasetError, OSError."""
    sizes = dataset.take(np.arange(min(LOOKED_AT, dataset.n)), ["width", "height"])
    return int(np.median(np.minimum(sizes["width"].to_numpy(), sizes["height"].to_numpy())))


def usual_image_size(dataset: Dataset) -> int:
    """Return the pictures' median shorter side, rounded down to one of SIDES."""
    return max((side for side in SIDES if side <= shorter_side(dataset)), default=SIDES[0])


def usual_batch_size(samples: int) -> int:
    """Return USUAL_BATCH_SIZE, or for few samples the largest power of two of which an epoch has four steps."""
    return min(USUAL_BATCH_SIZE, 1 << max(1, (samples // 4).bit_length() - 1))


def refuse_unnamed_encoders(model: ModelConfig, image_size: int, mode: str) -> None:
    """Raise ConfigError if an encoder must be given by name, because the views are large for the built-in one."""
    sides = {"image": model.image.name} | ({"text": model.text.name} if mode == "bimodal" else {})
    unnamed = [side for side, name in sides.items() if name == "auto"]
    if unnamed and image_size > LARGEST_FOR_BUILT_IN:
        named = "; ".join(NAMED[side] for side in unnamed)
        raise ConfigError(
            f"the built-in encoders are chosen for views of up to {LARGEST_FOR_BUILT_IN} pixels, but data.image_size = "
            f"{image_size}. Name the {' and the '.join(unnamed)} encoder: {named}. "
            f"Or train on smaller views: `--set data.image_size={LARGEST_FOR_BUILT_IN}`"
        )


def choices(asked: TrainConfig, resolved: TrainConfig, dataset: Dataset) -> list[str]:
    """Return a line for each setting that was chosen from dataset or machine, and one if pictures are enlarged."""
    data, side = resolved.data, shorter_side(dataset)
    lines = []
    if not asked.data.image_size:
        lines.append(f"data.image_size = {data.image_size}: half of the pictures have a shorter side of {side} or more")
    if not asked.batch_size:
        samples = rows_of(data.select) if data.select else dataset.n
        lines.append(f"batch_size = {resolved.batch_size}: {samples:,} samples")
    on_gpu = torch.cuda.is_available() and resolved.device != "cpu"
    if asked.data.loader == "auto" and data.loader == "ffcv" and on_gpu and not data.augmentation:
        lines.append("data.loader = ffcv: DALI, which decodes on the GPU, is missing: pip install 'thermopile[gpu]'")
    if data.image_size > side and asked.data.image_size:
        lines.append(
            f"pictures are enlarged: data.image_size = {data.image_size}, but half have a shorter side up to {side}"
        )
    return lines
