"""Settings from presets, TOML files and `key=value`, laid on top of one another, each with where it comes from."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import read_regular
from .config import TrainConfig, flat, load_config, nearest
from .errors import ConfigError

PRESETS = Path(__file__).parent / "presets"
MAX_BYTES, MAX_DOTS = 1 << 18, 300
"""Limits of a settings file and of a line in it: tomllib takes memory by the square of a key's parts."""
MAX_DEPTH = 8
"""Tables within tables in a file of settings; ours have four levels."""


@dataclass
class Layers:
    """A tree of settings, not yet checked, and the layer that each of its values was last set by."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Key in full → its layer, in words. What no layer set has its default."""

    def add(self, tree: Mapping[str, Any], origin: str) -> None:
        """Lay settings on top, as `merge` does."""
        self._add(tree, dict.fromkeys(flat(tree), origin))

    def add_preset(self, name: str) -> None:
        """Lay a preset on top, whose values may come from one that it extends. Raises ConfigError as `preset_chain`."""
        # Whole, not file by file: one that another objective's preset extends would drop the settings below it.
        preset = Layers()
        for part, own in preset_chain(name):
            preset.add(own, f"preset {part}")
        self._add(preset.tree, preset.origins)

    def _add(self, tree: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        merge(self.tree, tree)
        self.origins = {key: origins[key] if key in origins else self.origins[key] for key in flat(self.tree)}

    def load(self) -> TrainConfig:
        """The settings, checked. Raises ConfigError as `load_config`."""
        return load_config(self.tree)


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a file, not yet checked. Raises ConfigError where it is missing or no TOML."""
    try:
        return parse_toml(read_regular(path, MAX_BYTES), path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def parse_toml(text: bytes, path: Path) -> dict[str, Any]:
    """The settings in a text, not yet checked. Raises ConfigError, naming the file, where it is no TOML."""
    if any(line.count(b".") > MAX_DOTS for line in text.splitlines()):
        raise ConfigError(f"{path} is no settings: it has a line of more than {MAX_DOTS} dots")
    try:
        tree = tomllib.loads(text.decode())
    except ValueError as error:  # also bytes that are no UTF-8, and integers of thousands of digits
        raise ConfigError(f"{path} is no TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is no settings: it is nested too deeply") from None
    _refuse_depth(tree, path)
    return tree


def _refuse_depth(tree: dict[str, Any], path: Path) -> None:
    level: list[Any] = [tree]
    for _ in range(MAX_DEPTH):
        tables = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for table in tables for value in table if isinstance(value, dict | list)]
    if level:
        raise ConfigError(f"{path} is no settings: it is nested too deeply")


def preset_names() -> list[str]:
    return sorted(path.relative_to(PRESETS).with_suffix("").as_posix() for path in PRESETS.rglob("*.toml"))


def read_preset(name: str) -> dict[str, Any]:
    """The settings of a preset, on top of those of the preset that it extends. Raises ConfigError as `preset_chain`."""
    tree: dict[str, Any] = {}
    for _, own in preset_chain(name):
        merge(tree, own)
    return tree


def preset_chain(name: str, extended_by: tuple[str, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """A preset and those below it, each with the settings of its own file; the one that extends no other is the first.

    Raises ConfigError where there is none of that name, listing those there are, or where presets extend in a circle.
    """
    if name not in (known := preset_names()):
        wanted = f"{name!r}, which {extended_by[-1]!r} extends" if extended_by else repr(name)
        raise ConfigError(f"there is no preset {wanted}{nearest(name, known)}; there are: {', '.join(known)}")
    if name in extended_by:
        raise ConfigError(f"presets extend one another in a circle: {' → '.join((*extended_by, name))}")
    own = read_toml(PRESETS / f"{name}.toml")
    base = own.pop("extends", None)
    below = [] if base is None else preset_chain(base, (*extended_by, name))
    return [*below, (name, own)]


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> None:
    """Merge every `a.b=value` into the tree, in place; a value is TOML, or plain text where it is none."""
    asked: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"{override!r} is not key=value, as in optimizer.lr=0.001")
        *tables, last = key.split(".")
        table = asked
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{key}: {name} is a value, not a table of settings")
        table[last] = _toml_value(text)
    merge(tree, asked)


def merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Write `other` into `tree`, in place; tables are merged, values replaced.

    A table that names another objective or encoder replaces the old one whole, whose settings would mean nothing to it.
    An optimiser of another name keeps the schedule and the decay, and refuses what it does not know.
    """
    for key, value in other.items():
        old = tree.get(key)
        if isinstance(value, Mapping) and isinstance(old, dict) and (key == "optimizer" or _one_name(old, value)):
            merge(old, value)
        else:
            tree[key] = value


def _one_name(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "name" not in old or new.get("name", old["name"]) == old["name"]


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
