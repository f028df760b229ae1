"""Settings that are chosen from the dataset unless they are given, and what is said of each choice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product

import torch

from ...pipeline.dataset.index import TokenizerInfo
from ...pipeline.opening import SMALLEST, Dataset, Mixture, shorter_side
from ...pipeline.order.order import MIN_ROWS_PER_STEP, too_few
from ..config import ModelConfig, TrainConfig
from ..errors import ConfigError
from ..objectives import objective_class
from .selection_files import rows_of
from .settings_of_models import LEARNED, is_whole

USUAL_BATCH_SIZE = 256
LARGEST_FOR_BUILT_IN = 64
"""Side length of views, in pixels, up to which the built-in encoders are chosen."""
NAMED = {
    "image": {"hf:resnet-18": 10.6e9 / 224**2, "hf:resnet-50": 24.3e9 / 224**2},
    "text": {"hf:clip-text": 17.9e9 / 77},
}
"""Encoders to name for larger views → floating-point operations to train on a pixel or a token."""
MATRIX = 1024
"""Side of the matrices whose product shows how fast a device computes."""


def usual_batch_size(samples: int, shares: Sequence[int] = (1,)) -> int:
    """Return USUAL_BATCH_SIZE, or for few samples the largest power of two of which an epoch has four steps.

    shares: of a mixture's parts, in lowest terms; the result is their sum times a power of two. It is never less than
    gives each part the samples that an order takes.
    """
    usual = min(USUAL_BATCH_SIZE, 1 << max(1, samples // 4).bit_length() - 1)
    least = (-(-MIN_ROWS_PER_STEP // min(shares)) - 1).bit_length()  # exponent of the power of two
    return sum(shares) << max(least, (usual // sum(shares)).bit_length() - 1)


def refuse_few_samples(dataset: Dataset, samples: int) -> None:
    """Raise ConfigError if a step cannot take its samples of a dataset, of which `samples` are selected."""
    parts = {part.place: part.n for part in dataset.parts} if isinstance(dataset, Mixture) else {dataset.place: samples}
    for place, number in parts.items():
        if number < MIN_ROWS_PER_STEP:
            raise ConfigError(f"{place}: {too_few(number)}")


def refuse_unnamed_encoders(
    model: ModelConfig, image_size: int, mode: str, tokenizer: TokenizerInfo | None, device: torch.device
) -> None:
    """Raise ConfigError if an encoder must be given by name, because the views are large for the built-in one.

    The message has two sets of names, with the speed of each that this machine's arithmetic allows.
    """
    sides = {"image": model.image} | ({"text": model.text} if mode == "bimodal" else {})
    unnamed = [side for side, encoder in sides.items() if encoder.name == "auto"]
    if not unnamed or image_size <= LARGEST_FOR_BUILT_IN:
        return
    offers, speed = [], _flops_per_second(device)
    views = 1 if mode == "bimodal" else 2
    inputs = {"image": views * image_size**2, "text": tokenizer.context_length if tokenizer else 0}
    for names in product(*(NAMED[side] for side in unnamed)):
        named = dict(zip(unnamed, names, strict=True))
        words = " ".join(f"--set model.{side}.name={name}" for side, name in named.items())
        work = sum(NAMED[side][name] * inputs[side] for side, name in named.items())
        offers.append(f"`{words}` (at most {speed / work:,.0f} samples a second here)")
    raise ConfigError(
        f"the built-in encoders are chosen for views of up to {LARGEST_FOR_BUILT_IN} pixels, but data.image_size = "
        f"{image_size}. Name the {' and the '.join(unnamed)} encoder: {', or '.join(offers)}. "
        f"Or train on smaller views: `--set data.image_size={LARGEST_FOR_BUILT_IN}`"
    )


def _flops_per_second(device: torch.device) -> float:
    """Return how many floating-point operations of a float32 matrix product a device does; the second of two."""
    matrix = torch.ones(MATRIX, MATRIX, device=device)
    for _ in range(2):
        began = time.monotonic()
        (matrix @ matrix)[0, 0].item()  # waits for a GPU
    return 2 * MATRIX**3 / (time.monotonic() - began)


def choices_of(asked: TrainConfig, resolved: TrainConfig, dataset: Dataset) -> list[str]:
    """Return a line for each setting that was chosen from dataset or machine, and one if pictures are enlarged."""
    data, side = resolved.data, shorter_side(dataset)
    lines = []
    if not asked.data.image_size:
        lines.append(f"data.image_size = {data.image_size}: half of the pictures have a shorter side of {side} or more")
    if space := resolved.model.image.config.get("projection"):
        is_own = resolved.model.head == "linear" and resolved.model.dim == space
        head = "the model's own projection" if is_own else f"new; its own leads to {space} dimensions"
        lines.append(f"model.dim = {resolved.model.dim}: the image head is {head}")
    if resolved.objective.mode == "bimodal" and is_whole(resolved.model):
        kind = objective_class(resolved.objective.name).settings_of_mode["bimodal"]
        first = {*LEARNED, getattr(kind, "first_tau", "")} & resolved.objective.settings.keys()
        first -= asked.objective.settings.keys()
        lines += [
            f"objective.{name} = {resolved.objective.settings[name]:.4g}: as the model had learned it"
            for name in sorted(first)
        ]
    if not asked.batch_size:
        samples = rows_of(data.select) if data.select else dataset.n
        lines.append(f"batch_size = {resolved.batch_size}: {samples:,} samples")
    if data.image_size > max(side, SMALLEST) and asked.data.image_size:
        lines.append(
            f"pictures are enlarged: data.image_size = {data.image_size}, but half have a shorter side up to {side}"
        )
    return lines
