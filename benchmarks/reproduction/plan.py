"""Which runs are compared, with which settings, and in which order they are made.

A run is a dataset and all settings of `thermopile train`. What a later run is depends on the scores of earlier ones: a
search chooses settings on glyphs of another seed, and the compared runs have the chosen ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import product
from typing import Any, Literal, NamedTuple

from thermopile.pipeline.sources.glyphs import class_sizes

Mode = Literal["unimodal", "bimodal"]
MODES: tuple[Mode, ...] = ("unimodal", "bimodal")
WORDS: dict[Mode, str] = {"unimodal": "images", "bimodal": "pairs"}
Data = Literal["development", "long-tailed", "balanced"]

Settings = dict[str, Any]

BATCH = 128
EPOCHS: dict[Mode, int] = {"unimodal": 16, "bimodal": 32}
SEEDS = (0, 1, 2)
TRIALS = 8
"""Runs of a search; there are more where the best learning rate is not between two others."""
BASELINES = ("raw_pixels", "untrained")
RECIPES: dict[Mode, str] = {"unimodal": "glyphs", "bimodal": "clip"}
SAMPLES = int(class_sizes().sum())
"""Size of every training set."""
RATE = "optimizer.lr"
MIDDLE_RATE, RATES = 4e-3, (1e-3, 4e-3)
TAUS = (0.1, 0.3, 0.5)
"""The one grid of temperatures, for all losses with a softmax."""

SHARED: Settings = {
    "model.dim": 64,
    "model.image.config.width": 16,
    "data.image_size": 32,
    "channels_last": True,
    "optimizer.name": "adamw",
    "optimizer.weight_decay": 0.02,
    "optimizer.warmup_steps": 100,
    "checkpoint.every_steps": 0,
    "log_every": 100,
}
"""Settings of every run."""


def word(value: object) -> str:
    """A setting's value as the page shows it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


class Method(NamedTuple):
    """An objective, its form, and what is searched."""

    mode: Mode
    label: str
    """Its name on the page."""
    fixed: Settings
    """Settings that are not searched; what is not named has its default (docs/objectives.md)."""
    grid: dict[str, tuple[Any, ...]]
    """Setting -> its values; every combination is tried."""
    for_tau: bool = False
    """Whether the search goes by the correlation of class size and tau; else by the score, also over learning rates."""

    def candidates(self) -> list[Settings]:
        return [
            {RATE: MIDDLE_RATE} | dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())
        ]


def _method(
    mode: Mode, label: str, grid: Mapping[str, tuple[Any, ...]], fixed: Settings | None = None, objective: str = "",
    *, for_tau: bool = False,
) -> Method:  # fmt: skip
    """`fixed` and the keys of the grid are settings of the objective; those with a dot are any."""
    own = {"name": objective or label, "mode": mode} | (fixed or {})
    return Method(mode, label, {_key(key): value for key, value in own.items()},
                  {_key(key): values for key, values in grid.items()}, for_tau)  # fmt: skip


def _key(key: str) -> str:
    return key if "." in key else f"objective.{key}"


_TAU = {"tau": TAUS, RATE: RATES}
_SCALE = {"log_logit_scale": tuple(round(-math.log(tau), 4) for tau in TAUS), RATE: RATES}
_RHO = {"rho": (0.5, 1.0, 2.0), "tau_step": (0.1, 0.3)}
_WIDER = {"rho": (0.8, 1.6, 3.2), "gamma": (0.2, 0.8)}
_LARGE_STEPS = {"tau_init": 0.5, "eta": 0.25}
"""The code's eta of 0.01 in the paper's 400 epochs is 0.25 in 16; tau_step keeps it from taking tau to tau_min."""
_COSINE = {"gamma_decay_epochs": EPOCHS["bimodal"] // 2, "gamma_min": 0.2}
_MOCO = {"model.momentum": 0.99, "model.predictor": "moco_v3_resnet", "model.head": "moco_v3_resnet",
         "model.head_width": 256}  # fmt: skip
_WIDE = {"model.head": "vicreg", "model.head_width": 256, "model.dim": 256}

METHODS = (
    _method("unimodal", "simclr", _TAU),
    _method("unimodal", "sogclr", _TAU),
    _method("unimodal", "isogclr", {"rho": (0.1, 0.2, 0.4), "tau_step": (0.1, 0.3)}, _LARGE_STEPS),
    # Beyond the paper's rho, since the best constant tau is the lowest; once by the score, once by what tau says.
    _method("unimodal", "isogclr, wide", _WIDER, _LARGE_STEPS | {"tau_step": 0.3}, "isogclr"),
    _method("unimodal", "isogclr, for tau", _WIDER, _LARGE_STEPS | {"tau_step": 0.3}, "isogclr", for_tau=True),
    _method("unimodal", "decl, sampled", _TAU, objective="decl"),
    _method("unimodal", "decl, mean", _TAU, {"auxiliary": "mean"}, "decl"),
    _method("unimodal", "auc_cl", {"alpha": (0.1, 0.5, 1.0), "negatives": ("sum", "weighted")}),
    _method("unimodal", "auc_cl, code", {"a": (5.0, 10.0, 20.0), "negatives": ("sum", "weighted")},
            {"similarity": "shifted", "views": "all", "alpha": 1.0}, "auc_cl"),
    _method("unimodal", "moco_v3", _TAU, _MOCO),
    _method("unimodal", "barlow_twins", {"redundancy": (0.002, 0.0051, 0.02), RATE: RATES}, _WIDE),
    _method("unimodal", "vicreg", {"covariance": (0.3, 1.0, 3.0), RATE: RATES}, _WIDE),
    _method("unimodal", "simco", _TAU),
    _method("bimodal", "clip", _SCALE),
    _method("bimodal", "cyclip", _SCALE),
    _method("bimodal", "siglip", _SCALE),
    _method("bimodal", "sogclr", _TAU),
    _method("bimodal", "isogclr", _RHO, {"tau_init": 0.05, "eta": 0.005}),
    _method("bimodal", "fastclip_v0", _TAU, _COSINE),
    _method("bimodal", "fastclip_v1", _TAU, _COSINE),
    _method("bimodal", "fastclip_v2", _RHO, _COSINE),
    _method("bimodal", "fastclip_v3", {"rho": (0.5, 1.0, 2.0), "eta": (2e-4, 1e-3)}, _COSINE),
)  # fmt: skip
METHOD = {(method.mode, method.label): method for method in METHODS}

Length = Literal["epochs", "steps"]


class Run(NamedTuple):
    """One training, or a baseline that learns nothing."""

    data: Data
    settings: Settings

    @property
    def key(self) -> str:
        """Text that equal runs share."""
        return json.dumps([self.data, self.settings], sort_keys=True)

    @property
    def mode(self) -> Mode:
        mode: Mode = self.settings["objective.mode"]
        return mode


def train_run(
    method: Method, chosen: Settings, data: Data, *, seed: int = 0, batch: int = BATCH, length: Length = "epochs"
) -> Run:
    """A method's run; with length `steps` it has as many steps as one with batches of BATCH."""
    epochs = EPOCHS[method.mode] * (batch if length == "steps" else BATCH) // BATCH
    varied = {"seed": seed, "epochs": epochs, "batch_size": batch, "data.recipe": RECIPES[method.mode]}
    return Run(data, SHARED | varied | method.fixed | chosen)


def untrained_settings(mode: Mode) -> Settings:
    """The settings of every run of a mode that encoders and views follow from."""
    return SHARED | {"seed": 0, "data.recipe": RECIPES[mode], "objective.mode": mode}


def baseline_run(mode: Mode, data: Data, baseline: str) -> Run:
    """baseline: `untrained`, the encoder's initial weights; `raw_pixels`, grey, less their mean."""
    return Run(data, {"objective.mode": mode, "baseline": baseline})
