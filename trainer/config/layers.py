"""Merge settings from presets, TOML files and `key=value`, with the origin of each value."""

import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ...storage.place import AnyPlace, Place, place_of
from ..errors import ConfigError, refusing
from . import flat, nearest

PRESETS = Path(__file__).parents[1] / "presets"
TABLE = "table.toml"
"""The file of PRESETS with several presets in it, each a table with the preset's name."""
MAX_BYTES, MAX_DOTS = 1 << 18, 300
"""Limits on a settings file's size and on dots per line: tomllib's memory grows with the square of a key's parts."""
MAX_DEPTH = 8
"""Maximum nesting of tables in a settings file; ours have four levels."""

_RECIPE = "recipe"
"""Setting that is a name, or a table of changed fields that includes the name."""


@dataclass
class Layers:
    """A tree of unvalidated settings, and the layer that last set each value."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Full key → layer, as text. Values that no layer set are defaults."""

    def add(self, tree: Mapping[str, Any], origin: str) -> None:
        """Merge settings on top, as `merge` does."""
        self.put(Layers(dict(tree), dict.fromkeys(flat(tree), origin)))

    def add_preset(self, name: str) -> None:
        """Merge a preset on top, including the presets that it extends. Raises ConfigError as `preset_chain`."""
        # As a whole, not file by file: a preset based on another objective would drop the settings of earlier layers.
        preset = Layers()
        for part, own in preset_chain(name):
            preset.add(own, f"preset {part}")
        self.put(preset)

    def put(self, other: Self) -> None:
        """Merge other layers on top, with the origins of their settings."""
        merge(self.tree, other.tree)
        known = self.origins | other.origins
        # A name that has become a table of changed fields keeps its origin: data.recipe's is now data.recipe.name's.
        self.origins = {key: known.get(key) or known[key.removesuffix(".name")] for key in flat(self.tree)}


def read_toml(path: AnyPlace) -> dict[str, Any]:
    """Return the settings in a file, unvalidated. Raises ConfigError if it is missing or not valid TOML."""
    with refusing(f"{path} cannot be read", OSError):
        return parse_toml((place := place_of(path)).read_bytes(MAX_BYTES), place)


def parse_toml(text: bytes, path: Place) -> dict[str, Any]:
    """Return the settings in a text, unvalidated. Raises ConfigError, naming the file, if it is not valid TOML."""
    if any(line.count(b".") > MAX_DOTS for line in text.splitlines()):
        raise ConfigError(f"{path} is not a settings file: it has a line with more than {MAX_DOTS} dots")
    with suppress(RecursionError):
        with refusing(f"{path} is not valid TOML", ValueError):  # or UTF-8, or has integers of thousands of digits
            tree = tomllib.loads(text.decode())
        if _depth(tree) <= MAX_DEPTH:
            return tree
    raise ConfigError(f"{path} is not a settings file: it is nested too deeply")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def preset_names() -> list[str]:
    files = (path.relative_to(PRESETS) for path in PRESETS.rglob("*.toml") if path.name != TABLE)
    return sorted([*(path.with_suffix("").as_posix() for path in files), *read_toml(PRESETS / TABLE)])


def read_preset(name: str) -> dict[str, Any]:
    """Return the settings of a preset, merged over the preset that it extends. Raises ConfigError as `preset_chain`."""
    layers = Layers()
    layers.add_preset(name)
    return layers.tree


def preset_chain(name: str, extended_by: tuple[str, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Return a preset and the presets that it extends, each with its own settings; the base preset is first.

    Raises ConfigError for an unknown name, listing the presets, or if presets extend each other in a cycle.
    """
    if name not in (known := preset_names()):
        wanted = f"{name!r}, which {extended_by[-1]!r} extends" if extended_by else repr(name)
        raise ConfigError(f"unknown preset {wanted}{nearest(name, known)}; available: {', '.join(known)}")
    if name in extended_by:
        raise ConfigError(f"presets extend each other in a cycle: {' → '.join((*extended_by, name))}")
    own = read_toml(PRESETS / TABLE).get(name) or read_toml(PRESETS / f"{name}.toml")
    base = own.pop("extends", None)
    below = [] if base is None else preset_chain(base, (*extended_by, name))
    return [*below, (name, own)]


def from_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the tree of settings written as `a.b=value`; a value is TOML, or plain text if it does not parse."""
    asked: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"{override!r} is not key=value, as in optimizer.lr=0.001")
        *tables, last = key.split(".")
        table = asked
        for name in tables:
            table[name] = table = _as_table(name, table.get(name, {}))
            if not isinstance(table, dict):
                raise ConfigError(f"{key}: {name} is a value, not a table of settings")
        value: Any = text
        with suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {text}")["value"]
        if last == _RECIPE and isinstance(value, str) and isinstance(fields := table.get(last), dict):
            fields["name"] = value
        else:
            table[last] = value
    return asked


def _as_table(key: str, value: Any) -> Any:
    """Return a recipe's name as the table for its changed fields; other values unchanged."""
    return {"name": value} if key == _RECIPE and isinstance(value, str) else value


def merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Merge `other` into `tree`, in place: tables are merged, values replaced.

    A table that names another objective, encoder or recipe replaces the old table entirely, since its settings would
    not apply. If the optimiser's name changes, schedule and decay stay; unknown settings are rejected later.
    """
    for key, value in other.items():
        old = tree.get(key)
        old = _as_table(key, old) if isinstance(value, Mapping) else None
        has_name = isinstance(old, dict) and "name" in old and key != "optimizer"
        if isinstance(old, dict) and not (has_name and value.get("name", old["name"]) != old["name"]):
            tree[key] = old
            merge(old, value)
        else:
            tree[key] = deepcopy(value)
