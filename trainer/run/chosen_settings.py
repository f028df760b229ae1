"""Settings of a new run that are chosen unless they are given: from the dataset, and from its models."""

import math
from collections.abc import Sequence
from math import inf

from ...pipeline.opening import SMALLEST, Dataset, Mixture, shorter_side
from ...pipeline.order.order import MIN_ROWS_PER_STEP, too_few
from ...pipeline.views.recipes import RECIPES
from ..config import ModelConfig, RecipeConfig, TrainConfig
from ..encoders import open_clip_encoders
from ..encoders.locking import starts_trained
from ..errors import ConfigError
from ..objectives import Settings, objective_class
from ..objectives.sogclr import BoundedTau
from ..plugins import OPEN_CLIP, TIMM
from .selection_files import rows_of

USUAL_BATCH_SIZE = 256
LARGEST_FOR_BUILT_IN = 64
"""Side length of views, in pixels, up to which the built-in encoders are chosen."""
NAMED = {"image": "hf:resnet-18", "text": "hf:clip-text"}
"""Encoders to name for larger views, the fastest."""
LEARNED = {"log_logit_scale": "logit_scale", "logit_bias": "logit_bias"}
"""Parameters of an objective that learns a global temperature → tensors of a whole CLIP or SigLIP."""


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
    named = " ".join(f"--set model.{side}.name={NAMED[side]}" for side in unnamed)
    raise ConfigError(
        f"the built-in encoders are chosen for views of up to {LARGEST_FOR_BUILT_IN} pixels, but data.image_size = "
        f"{image_size}. Name the {' and the '.join(unnamed)} encoder: `{named}`, or others of docs/encoders.md. Or "
        f"train on smaller views: `--set data.image_size={LARGEST_FOR_BUILT_IN}`"
    )


def with_settings_of_models(asked: ModelConfig, config: TrainConfig, objective: Settings) -> TrainConfig:
    """Return the settings with what newly named models have, where nothing else is set.

    asked: the settings before the architectures were recorded in `config`; a resumed run's are recorded already.
    objective: its settings. Raises ConfigError if a directory or package cannot be read.
    """
    sides = ("image", "text") if config.objective.mode == "bimodal" else ("image",)
    new = [side for side in sides if getattr(config.model, side).config != getattr(asked, side).config]
    model, data, temperature = config.model, config.data, config.objective
    spaces = [space for side in new if (space := getattr(model, side).config.get("projection"))]
    if spaces and "dim" not in asked.model_fields_set:
        model = model.model_copy(update={"dim": spaces[0]})
    theirs: dict[str, list[float]] = {}
    if starts_trained(model.image) and ("image" in new or model.image.name.startswith((TIMM, OPEN_CLIP))):
        from ..encoders.image_processor import normalisation

        has_warned = "image" not in new and config.order.canonical_shards > 0  # when the run started
        theirs = normalisation(model.image, data.image_size, quiet=has_warned)
    recipe = RecipeConfig(name=data.recipe) if isinstance(data.recipe, str) else data.recipe
    usual = RECIPES.get(recipe.name)  # a user's own recipe has its own normalisation
    unusual = {key: value for key, value in theirs.items() if usual and tuple(value) != getattr(usual, key)}
    if unusual.keys() - recipe.fields.keys():
        data = data.model_copy(update={"recipe": RecipeConfig(name=recipe.name, **unusual | recipe.fields)})
    if len(sides) == 2 and is_whole(model) and (len(new) == 2 or model.image.name.startswith(OPEN_CLIP)):
        own = _temperature(config, objective) | temperature.settings
        temperature = type(temperature)(name=temperature.name, mode=temperature.mode, **own)
    return config.model_copy(update={"model": model, "data": data, "objective": temperature})


def has_own_heads(model: ModelConfig) -> bool:
    """Return whether both encoders are towers of a whole CLIP or SigLIP with its projections as heads."""
    sides = (model.image.config, model.text.config)
    kinds = {str(side.get("model_type")).partition("_")[0] for side in sides}
    spaces = [side.get("projection") for side in sides]
    return model.head == "linear" and len(kinds) == 1 and spaces == [model.dim, model.dim]


def is_whole(model: ModelConfig) -> bool:
    """Return whether both encoders begin with towers and heads of one CLIP or SigLIP, of transformers or open_clip."""
    image = model.image
    is_pair = image.name.startswith(OPEN_CLIP) and model.head == "none"
    return image.name == model.text.name and (is_pair or has_own_heads(model)) and starts_trained(image)


def learned_by(model: ModelConfig) -> dict[str, float]:
    """Return `logit_scale`, and a `logit_bias`, of a whole model. Raises ConfigError if they cannot be read."""
    image = model.image
    if image.name.startswith(OPEN_CLIP):
        return open_clip_encoders.learned_by(image.name.removeprefix(OPEN_CLIP))
    from ..encoders.hf_directory import folder_of, stored_tensor

    folder, has_bias = folder_of(image.name), str(image.config["model_type"]).startswith("siglip")
    names = [*LEARNED.values()][: 2 if has_bias else 1]
    return {name: stored_tensor(f"hf:{folder}", folder, name).item() for name in names}


def _temperature(config: TrainConfig, objective: Settings) -> dict[str, float]:
    """Return the objective's first temperature from the whole model; empty if it has none, or one of another kind."""
    known, given = type(objective).model_fields, config.objective.settings
    wanted = {name: theirs for name, theirs in LEARNED.items() if name in known}
    if isinstance(objective, BoundedTau):
        wanted = {objective.first_tau: "logit_scale"}
    if given.keys() >= wanted.keys():  # as in a resumed run
        return {}
    theirs = learned_by(config.model)
    if not theirs.keys() >= {*wanted.values()}:
        return {}
    if isinstance(objective, BoundedTau):
        tau = math.exp(-theirs["logit_scale"])
        return {objective.first_tau: min(max(tau, objective.tau_min), objective.tau_max)}
    most = {name: min([inf, *(getattr(limit, "le", inf) for limit in known[name].metadata)]) for name in wanted}
    return {name: min(most[name], theirs[tensor]) for name, tensor in wanted.items()}


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
        for name in sorted(first):
            value = f"{resolved.objective.settings[name]:.4g}"
            lines.append(f"objective.{name} = {value}: as the model had learned it, within its bounds")
    if not asked.batch_size:
        samples = rows_of(data.select) if data.select else dataset.n
        lines.append(f"batch_size = {resolved.batch_size}: {samples:,} samples")
    if data.image_size > max(side, SMALLEST) and asked.data.image_size:
        lines.append(f"data.image_size = {data.image_size} enlarges pictures: half have a shorter side up to {side}")
    return lines
