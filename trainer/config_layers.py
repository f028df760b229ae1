"""Settings laid on top of one another, later ones winning, each with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import TrainConfig, flat, load_config, merge, preset_chain


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
