"""Which runs are compared, and with which settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Mode = Literal["bimodal", "unimodal"]
MODES: tuple[Mode, ...] = ("bimodal", "unimodal")


class Method(NamedTuple):
    """An objective with the settings that it is compared with."""

    mode: Mode
    name: str
    settings: dict[str, float]
    """The objective's settings; the others keep their defaults (docs/objectives.md)."""
    tried: str
    """What was tried for the settings, these among it, on glyphs drawn with another seed."""

    @property
    def words(self) -> str:
        return ", ".join(f"{key} {value:g}" for key, value in self.settings.items()) or "defaults"


METHODS = (
    Method("bimodal", "clip", {}, "learns its temperature"),
    Method("bimodal", "sogclr", {"tau": 0.1}, "tau 0.03, 0.05, 0.1"),
    Method("bimodal", "isogclr", {"rho": 0.5, "tau_init": 0.05, "eta": 0.02}, "rho 0.5, 1, 2, 3"),
    Method("bimodal", "fastclip_v3", {"rho": 1.0}, "rho 1, 2"),
    Method("unimodal", "simclr", {"tau": 0.3}, "tau 0.1, 0.3"),
    Method("unimodal", "isogclr", {"rho": 1.0, "tau_init": 0.3, "eta": 0.05},
           "rho 0.3 with tau_init 0.7 and eta 0.01; rho 0.3, 1 with tau_init 0.3 and eta 0.05"),
    Method("unimodal", "decl", {"tau": 0.1}, "tau 0.1, 0.3"),
    Method("unimodal", "auc_cl", {"alpha": 1.0}, "alpha 0.1, 0.5, 1"),
)  # fmt: skip

SHARED: dict[str, Any] = {
    "model.dim": 64,
    "data.image_size": 32,
    "optimizer.name": "adamw",
    "optimizer.weight_decay": 0.02,
    "optimizer.warmup_epochs": 2,
    "checkpoint.every_minutes": 1,
}
"""Settings of every run."""
RECIPES: dict[Mode, str] = {"bimodal": "clip", "unimodal": "clip"}
"""crop_flip and simclr_cifar were tried for images too, but a mirrored or cut glyph is a different one."""
RATE, RATE_BATCH = 1e-3, 128
"""Learning rate at this batch size; it grows in proportion, as FastCLIP's and AUC-CL's do."""


class Run(NamedTuple):
    """One training."""

    method: Method
    batch_size: int
    seed: int
    epochs: int

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.method.mode}-{self.method.name}-b{self.batch_size}-seed{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """What `thermopile train --set` is given."""
        method = self.method
        objective = {"name": method.name, "mode": method.mode} | method.settings
        return SHARED | {
            "seed": self.seed,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "data.recipe": RECIPES[method.mode],
            "optimizer.lr": RATE * self.batch_size / RATE_BATCH,
            **{f"objective.{key}": value for key, value in objective.items()},
        }


@dataclass(frozen=True)
class Plan:
    """The size of a comparison."""

    batch_sizes: tuple[int, ...]
    seeds: dict[Mode, int]
    """How many, 0, 1, …, each mode has."""
    epochs: dict[Mode, int]
    methods: tuple[Method, ...] = METHODS

    def runs(self) -> list[Run]:
        """Every training, the small batches first."""
        return [
            Run(method, batch_size, seed, self.epochs[method.mode])
            for batch_size in self.batch_sizes
            for method in self.methods
            for seed in range(self.seeds[method.mode])
        ]


EPOCHS: dict[Mode, int] = {"bimodal": 30, "unimodal": 60}
SHORT = Plan((128,), {"bimodal": 2, "unimodal": 1}, EPOCHS)
FULL = Plan((128, 256), {"bimodal": 3, "unimodal": 3}, EPOCHS)
"""Holds the runs of SHORT as well, which are not made again."""
