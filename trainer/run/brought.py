"""What a new run takes from its models besides weights: dimension, temperature, normalisation."""

import math
from math import inf

from ...pipeline.augment import RECIPES
from ..config import ModelConfig, RecipeConfig, TrainConfig
from ..encoders.open_clip_encoders import published_normalisation
from ..objectives.base import Settings

LEARNED = {"log_logit_scale": "logit_scale", "logit_bias": "logit_bias"}
"""Parameters of an objective that learns a global temperature → tensors of a whole CLIP or SigLIP."""


def with_what_models_bring(asked: ModelConfig, config: TrainConfig, objective: type[Settings]) -> TrainConfig:
    """Return the settings with what newly named models have, where nothing else is set.

    asked: the settings before the architectures were recorded in `config`; a resumed run's are recorded already.
    objective: the class of its settings. Raises ConfigError if a directory or package cannot be read.
    """
    sides = ("image", "text") if config.objective.mode == "bimodal" else ("image",)
    new = [side for side in sides if getattr(config.model, side).config != getattr(asked, side).config]
    model, data, temperature = config.model, config.data, config.objective
    spaces = [space for side in new if (space := getattr(model, side).config.get("projection"))]
    if spaces and "dim" not in asked.model_fields_set:
        model = model.model_copy(update={"dim": spaces[0]})
    theirs = published_normalisation(model.image)
    if "image" in new:
        from ..encoders.hf_directory import folder_of
        from ..encoders.image_processor import normalisation

        if model.image.config.get("pretrained", True):
            theirs = normalisation(folder_of(model.image.name), data.image_size)
    recipe = RecipeConfig(name=data.recipe) if isinstance(data.recipe, str) else data.recipe
    usual = RECIPES.get(recipe.name)  # a user's own recipe has its own normalisation
    brought = {key: value for key, value in theirs.items() if usual and tuple(value) != getattr(usual, key)}
    if brought.keys() - recipe.fields.keys():
        data = data.model_copy(update={"recipe": RecipeConfig(name=recipe.name, **brought | recipe.fields)})
    if len(new) == 2 and model.image.name == model.text.name and has_own_heads(model):
        found = _temperature(config, objective) | temperature.settings
        temperature = type(temperature)(name=temperature.name, mode=temperature.mode, **found)
    return config.model_copy(update={"model": model, "data": data, "objective": temperature})


def has_own_heads(model: ModelConfig) -> bool:
    """Return whether both encoders are towers of a whole CLIP or SigLIP with its projections as heads."""
    sides = (model.image.config, model.text.config)
    kinds = {str(side.get("model_type")).partition("_")[0] for side in sides}
    spaces = [side.get("projection") for side in sides]
    return model.head == "linear" and len(kinds) == 1 and spaces == [model.dim, model.dim]


def _temperature(config: TrainConfig, objective: type[Settings]) -> dict[str, float]:
    """Return the objective's first temperature from the whole model; empty if it has none, or one of another kind."""
    from ..encoders.hf_directory import folder_of, stored_tensor

    image, given = config.model.image, config.objective.settings
    known, folder = objective.model_fields, folder_of(image.name)
    where, wanted = f"hf:{folder}", [name for name in LEARNED if name in known]
    has_bias = str(image.config["model_type"]).startswith("siglip")
    if not image.config.get("pretrained", True) or ("logit_bias" in wanted and not has_bias):
        return {}
    if first := getattr(objective, "first_tau", None):
        lowest, highest = (given.get(name, known[name].default) for name in ("tau_min", "tau_max"))
        tau = math.exp(-stored_tensor(where, folder, LEARNED["log_logit_scale"]).item())
        return {first: min(max(tau, lowest), highest)}
    most = {name: min([inf, *(getattr(limit, "le", inf) for limit in known[name].metadata)]) for name in wanted}
    return {name: min(most[name], stored_tensor(where, folder, LEARNED[name]).item()) for name in wanted}
