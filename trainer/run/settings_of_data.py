"""Settings that are chosen from the dataset unless they are given, and a line on each choice."""

from collections.abc import Sequence
from itertools import product

from ...pipeline.opening import SMALLEST, Dataset, Mixture, shorter_side
from ...pipeline.order.order import MIN_ROWS_PER_STEP, too_few
from ..config import ModelConfig, TrainConfig
from ..encoders.locking import starts_trained
from ..errors import ConfigError
from ..objectives import objective_class
from .selection_files import rows_of
from .settings_of_models import LEARNED, is_whole

USUAL_BATCH_SIZE = 256
LARGEST_FOR_BUILT_IN = 64
"""Side length of views, in pixels, up to which the built-in encoders are chosen."""
NAMED = {"image": ("hf:resnet-18", "hf:resnet-50"), "text": ("hf:clip-text",)}
"""Encoders to name for larger views, the fastest first."""


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


def refuse_unnamed_encoders(model: ModelConfig, image_size: int, mode: str) -> None:
    """Raise ConfigError if an encoder must be given by name, because the views are large for the built-in one."""
    sides = ("image", "text") if mode == "bimodal" else ("image",)
    unnamed = [side for side in sides if getattr(model, side).name == "auto"]
    if not unnamed or image_size <= LARGEST_FOR_BUILT_IN:
        return
    offers = []
    for names in product(*(NAMED[side] for side in unnamed)):
        named = zip(unnamed, names, strict=True)
        offers.append(f"`{' '.join(f'--set model.{side}.name={name}' for side, name in named)}`")
    raise ConfigError(
        f"the built-in encoders are chosen for views of up to {LARGEST_FOR_BUILT_IN} pixels, but data.image_size = "
        f"{image_size}. Name the {' and the '.join(unnamed)} encoder: {', or '.join(offers)} (`thermopile bench step` "
        f"times them). Or train on smaller views: `--set data.image_size={LARGEST_FOR_BUILT_IN}`"
    )


def choices_of(asked: TrainConfig, resolved: TrainConfig, dataset: Dataset) -> list[str]:
    """Return a line for each setting that was chosen from dataset or machine, and one if pictures are enlarged."""
    data, side = resolved.data, shorter_side(dataset)
    lines = []
    if not asked.data.image_size:
        lines.append(f"data.image_size = {data.image_size}: half of the pictures have a shorter side of {side} or more")
    image = resolved.model.image
    if space := image.config.get("projection"):
        is_own = resolved.model.head == "linear" and resolved.model.dim == space and starts_trained(image)
        head = "the model's own projection" if is_own else f"new; its own leads to {space} dimensions"
        lines.append(f"model.dim = {resolved.model.dim}: the image head is {head}")
    if resolved.objective.mode == "bimodal" and is_whole(resolved.model):
        kind = objective_class(resolved.objective.name).settings_of_mode["bimodal"]
        first = {*LEARNED, getattr(kind, "first_tau", "")} & resolved.objective.settings.keys()
        first -= asked.objective.settings.keys()
        settings = resolved.objective.settings
        for name in sorted(first):
            most = (getattr(limit, "le", None) for limit in kind.model_fields[name].metadata)
            is_bound = settings[name] in (settings.get("tau_min"), settings.get("tau_max"), *most)
            near = "near to what the model had learned as its bounds allow"
            learned = f"as {near if is_bound else 'the model had learned it'}"
            lines.append(f"objective.{name} = {settings[name]:.4g}: {learned}")
    if not asked.batch_size:
        samples = rows_of(data.select) if data.select else dataset.n
        lines.append(f"batch_size = {resolved.batch_size}: {samples:,} samples")
    if data.image_size > max(side, SMALLEST) and asked.data.image_size:
        lines.append(
            f"pictures are enlarged: data.image_size = {data.image_size}, but half have a shorter side up to {side}"
        )
    return lines
