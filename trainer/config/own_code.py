"""A user's own code in settings: which settings name it, and whether it may be imported."""

import logging
from collections.abc import Iterable, Mapping

from ..errors import ConfigError
from ..plugins import file_of, is_own_encoder, is_plugin
from . import TrainConfig, flat

_log = logging.getLogger(__name__)

CODE_OF_FEATURES = ("data.recipe", "data.recipe.name", "model.image.name", "model.text.name")
CODE = ("data.augmentation", "objective.name", "trackers", *CODE_OF_FEATURES)
"""Settings that may name a user's own code, as `module:name`; features depend on CODE_OF_FEATURES."""
ALLOW = "add --allow-code"


def code_in(config: TrainConfig, keys: Iterable[str] = CODE) -> dict[str, str]:
    """Return key → `module:name` of the code that a run with these settings imports; of `trackers`, with spaces."""
    values = {key: value for key, value in flat(config.model_dump()).items() if key in keys}
    if config.objective.mode == "unimodal":
        values.pop("model.text.name", None)
    if "trackers" in values:
        values["trackers"] = " ".join(filter(is_plugin, values["trackers"]))
    return {
        key: name for key, name in values.items() if (is_own_encoder if key.startswith("model.") else is_plugin)(name)
    }


def refuse_code(named: Mapping[str, str], where: object, cure: str = ALLOW) -> None:
    """Raise ConfigError if `named` has any code. named: as `code_in` returns it; where: the file that names it."""
    if named:
        sets = " and ".join(f"{key} = {code!r}" for key, code in named.items())
        raise ConfigError(f"{where} sets {sets}, which imports that module and runs its code. If you trust it, {cure}")


def announce_code(named: Mapping[str, str]) -> None:
    """Log the code about to be imported, and its file."""
    for key, codes in named.items():
        for code in codes.split() if key == "trackers" else [codes]:
            _log.warning("imports %s = %s from %s", key, code, file_of(code) or "a place that is not found")
