"""A user's own objects, which settings name as `module:name`: which settings do, and whether they may be imported."""

import logging
import site
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any

from .config import TrainConfig, flat
from .errors import ConfigError

WRITE = "Write module:name, with the module's directory in PYTHONPATH"

HF, TIMM, OPEN_CLIP = "hf:", "timm:", "open_clip:"
"""Before the name of an encoder that transformers, timm or open_clip makes."""

_log = logging.getLogger(__name__)

CODE_OF_FEATURES = ("data.recipe", "data.recipe.name", "model.image.name", "model.text.name")
CODE = ("data.augmentation", "objective.name", "trackers", *CODE_OF_FEATURES)
"""Settings that may name a user's own code, as `module:name`; features depend on CODE_OF_FEATURES."""
ALLOW = "add --allow-code"


class PluginError(ConfigError, ValueError):
    """An object cannot be imported, or is not of the required kind."""


def is_plugin(name: str) -> bool:
    """Return whether a name is `module:name` instead of a built-in."""
    return ":" in name


def is_own_encoder(name: str) -> bool:
    """Return whether an encoder's name is `module:name`, rather than a built-in or one of a library."""
    return is_plugin(name) and not name.startswith((HF, TIMM, OPEN_CLIP))


def is_directory(name: str) -> bool:
    """Return whether an encoder's name is `hf:` and a path, rather than a model name of transformers."""
    return name.startswith(HF) and "/" in name


def file_of(name: str) -> str:
    """Return the file or folder of `module:name` without running it; empty if not found."""
    try:
        spec = find_spec(name.partition(":")[0].partition(".")[0])  # the outermost package: finding others imports it
    except (ImportError, ValueError):
        return ""
    return "" if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def installed(kind: str) -> dict[str, str]:
    """Return name → `module:name` of the entry points `thermopile.KIND`, of packages in site-packages alone."""
    found = distributions(path=[*site.getsitepackages(), site.getusersitepackages()])  # not in the working directory
    return {each.name: each.value for of in found for each in of.entry_points if each.group == f"thermopile.{kind}"}


def load_plugin(name: str, where: str) -> Any:
    """Import the object `module:name`, which runs the module. Raises PluginError if that fails.

    where: what names it, for messages.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise PluginError(f"{where} is not module:name. {WRITE}")
    try:
        imported = import_module(module)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise PluginError(f"{where} cannot be imported: {reason}. {WRITE}") from error
        raise PluginError(f"{where} cannot be used, since the module {module} ends with an error: {reason}") from error
    try:
        return getattr(imported, attribute)
    except Exception as error:  # a module may look names up by its own code
        raise PluginError(f"{where} is not in {file_of(name)}, which has no {attribute!r}") from error


def code_in(config: TrainConfig, keys: Iterable[str] = CODE) -> dict[str, str]:
    """Return key → `module:name` of the code that a run with these settings imports; of `trackers`, with spaces."""
    values = {key: value for key, value in flat(config.model_dump()).items() if key in keys}
    if config.objective.mode == "unimodal":
        values.pop("model.text.name", None)
    if "trackers" in values:
        values["trackers"] = " ".join(filter(is_plugin, values["trackers"]))
    return {key: name for key, name in values.items() if (is_own_encoder if "model." in key else is_plugin)(name)}


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
