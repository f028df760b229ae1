"""A user's own objects, which settings name as `module:name`."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

WRITE = "Write module:name, with the module's directory in PYTHONPATH"


HF, TIMM, OPEN_CLIP = "hf:", "timm:", "open_clip:"
"""Before the name of an encoder that transformers, timm or open_clip makes."""


class PluginError(ValueError):
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


def load_plugin(name: str) -> Any:
    """Import the object `module:name`, which runs the module. Raises PluginError if that fails."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise PluginError(f"is not module:name. {WRITE}")
    try:
        imported = import_module(module)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise PluginError(f"cannot be imported: {reason}. {WRITE}") from error
        raise PluginError(f"cannot be used, because the module {module} ends with an error: {reason}") from error
    try:
        return getattr(imported, attribute)
    except Exception as error:  # a module may look names up by its own code
        raise PluginError(f"is not in {file_of(name)}, which has no {attribute!r}") from error
