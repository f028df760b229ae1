"""Settings that a new run takes from its models: dimension, temperature, normalisation."""

import math
from math import inf

from ...pipeline.views.recipes import RECIPES
from ..config import ModelConfig, RecipeConfig, TrainConfig
from ..encoders import open_clip_encoders
from ..encoders.locking import starts_trained
from ..objectives.base import Settings
from ..objectives.sogclr import BoundedTau
from ..plugins import OPEN_CLIP, TIMM

LEARNED = {"log_logit_scale": "logit_scale", "logit_bias": "logit_bias"}
"""Parameters of an objective that learns a global temperature → tensors of a whole CLIP or SigLIP."""


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
        from ..encoders.hf_directory import folder_of
        from ..encoders.image_processor import library_normalisation, normalisation

        if "image" in new:
            theirs = normalisation(folder_of(model.image.name), data.image_size)
        else:  # quiet where the run's start has warned
            theirs = library_normalisation(model.image, data.image_size, quiet=config.order.canonical_shards > 0)
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
    return {
        name: stored_tensor(f"hf:{folder}", folder, name).item() for name in [*LEARNED.values()][: 2 if has_bias else 1]
    }


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
