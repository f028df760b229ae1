"""A run's settings as TOML, each value with its origin: `thermopile train --print-config`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from ..trainer.config import TrainConfig, flat
from ..trainer.config.layers import Layers
from ..trainer.encoders import is_directory
from ..trainer.run.build import objective_of
from .printing import plain_text


def shown_settings(settings: TrainConfig, layers: Layers) -> str:
    """Return all settings of a run, unset ones as comments; `--config` accepts the text.

    settings: the merged layers, resolved if there is a dataset. Values that resolving changed show the original.
    """
    tree = settings.model_dump(mode="json")
    if settings.objective.mode != "auto":
        tree["objective"] |= objective_of(settings).settings.model_dump(mode="json")
    asked = flat(layers.load().model_dump(mode="json"))
    sides = {"image": settings.model.image, "text": settings.model.text}
    models = {f"model.{side}.config": encoder.name for side, encoder in sides.items() if is_directory(encoder.name)}
    lines = []
    for table, key, value in _entries(tree):
        full = f"{table}.{key}".removeprefix(".")
        origin = layers.origins.get(full, f"from {Path(models[table]).name}" if table in models else "default")
        if full in asked and asked[full] != value:
            origin = f"resolved from {asked[full]} ({origin})"
        lines.append((table, f"# {key} = none" if value is None else f"{key} = {_toml(value)}", plain_text(origin)))
    return _aligned(lines)


def _entries(tree: dict[str, Any], table: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield table, key and value of every setting, a table's own settings before its subtables."""
    for key, value in tree.items():
        if not isinstance(value, dict):
            yield table, _toml_key(key), value
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{table}.{key}".removeprefix("."))


def _aligned(lines: list[tuple[str, str, str]]) -> str:
    """Join the lines under their table headers, with origins aligned."""
    width = min(44, max(len(setting) for _, setting, _ in lines))
    text, current = [], ""
    for table, setting, origin in lines:
        if table != current:
            text += ["", f"[{table}]"]
            current = table
        text.append(f"{setting:<{width}}  # {origin}")
    return "\n".join(text)


def _toml(value: Any) -> str:
    """Format the value on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return _escaped(tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n"))


def _toml_key(key: str) -> str:
    return _escaped(tomli_w.dumps({key: 0}).removesuffix(" = 0\n"))


def _escaped(text: str) -> str:
    """Escape invisible and bidi characters the TOML way; the settings may be untrusted."""
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in text)
