"""The methods that are compared, what is searched of each, and what a run is.

A run is a dataset and every setting of `thermopile train` whose default might change. What a later run is depends on
the scores of earlier ones: a search chooses settings on glyphs of other seeds, and the compared runs have them.
"""

from __future__ import annotations

import json
import math
from itertools import product
from typing import Any, Literal, NamedTuple

from thermopile.pipeline.sources.glyphs import class_sizes

Mode = Literal["unimodal", "bimodal"]
MODES: tuple[Mode, ...] = ("unimodal", "bimodal")
WORDS: dict[Mode, str] = {"unimodal": "images", "bimodal": "pairs"}
Data = str
"""`development`, `long-tailed` or `balanced` glyphs; `drawings`, `emoji`, `icons` or `fashion`, also with
`-development`; `icons-all`; after @ the percentage of the training set's captions that are wrong, and RIGHT if the set
has only the others."""
RIGHT = "-right"
"""How the name of a training set without its wrong captions ends."""
Head = Literal["simclr_bn", "linear"]
On = Literal["glyphs", "drawings", "emoji", "icons", "fashion"]

Settings = dict[str, Any]

BATCH = 128
EPOCHS: dict[Mode, int] = {"unimodal": 16, "bimodal": 32}
EPOCHS_ON_DRAWINGS = 64
EPOCHS_ON: dict[On, int] = {"icons": 8, "fashion": 16}
TRIALS, TRIALS_AGAIN, TRIALS_UNDER_NOISE, TRIALS_OF_RIVAL = 16, 8, 12, 5
"""Runs of a search; of one that is begun from what another chose; of both on data with wrong
captions."""
BASELINES = ("raw_pixels", "untrained")
"""On drawings there is the latter alone: retrieval needs texts."""
SAMPLES = int(class_sizes().sum())
"""Size of every training set."""
RATE = "optimizer.lr"
DIVIDED_AFTER = "division.after"
"""Epochs after which pairs are divided by their losses before every epoch (`division`)."""
CURATED = "curated"
"""Whether it is a second run, on what `curate --drop-misfits` keeps by a first that is like it."""
VARIED = "temperatures.power"
"""Power of the solved temperatures that a run's own are proportional to (`varied`)."""
FORKED_AT, FORKED_WITHOUT = "fork.at", "fork.without"
"""Percentage of the steps of another run after which it goes on with that one, and what it goes on without."""

SHARED: Settings = {
    "model.dim": 64,
    "model.image.name": "conv",
    "model.image.config.width": 16,
    "data.image_size": 32,
    "channels_last": True,
    "precision": "float32",
    "optimizer.name": "adamw",
    "optimizer.weight_decay": 0.02,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.warmup": 100,
    "optimizer.lr_min": 0.0,
    "checkpoint.every_steps": 0,
    "log_every": 100,
}
"""Settings of every run."""
SHARED_OF: dict[Mode, Settings] = {
    "unimodal": {"data.recipe": "glyphs"},
    "bimodal": {"data.recipe": "clip", "model.head": "linear", "model.text.name": "mean_embedding"},
}
WIDTH_OF_HEAD: dict[Head, int] = {"simclr_bn": 256, "linear": 0}


def base_of(data: Data) -> str:
    """Return the name of the same data without wrong captions."""
    return data.partition("@")[0]


def wrong_share(data: Data) -> float:
    """Return the share of wrong captions, 0 … 1."""
    return float(data.partition("@")[2].removesuffix(RIGHT) or 0) / 100


def is_searched_on(data: Data) -> bool:
    """Whether settings are chosen there, and nothing is compared."""
    return base_of(data).endswith("development")


def is_drawn(data: Data) -> bool:
    """Whether these are drawings, emoji or icons, which are scored by retrieval alone."""
    return data.startswith(("drawings", "emoji", "icons"))


def is_real(data: Data) -> bool:
    """Whether these are icons or Fashion-MNIST, whose test sets the results describe."""
    return data.startswith(("icons", "fashion"))


class Axis(NamedTuple):
    """A setting that is searched: its values on the grid, and how far those beyond and between them are."""

    values: tuple[Any, ...]
    factor: float = 2.0
    """A neighbour of a value is so many times as large, or as small; 0: there are no others."""
    limits: tuple[float, float] = (0.0, math.inf)
    shift: float = 0.0
    """Where it is not 0, a neighbour is so much larger or smaller instead: the setting is a logarithm."""

    def beside(self, value: Any, power: float) -> float | None:
        """The value `power` factors above; None where there is none."""
        if not self.factor:
            return None
        found = value + power * self.shift if self.shift else value * self.factor**power
        if not self.limits[0] <= found <= self.limits[1]:
            return None
        rounded = float(f"{found:.4g}")
        return int(rounded) if isinstance(value, int) and rounded.is_integer() else rounded


class Method(NamedTuple):
    """An objective, and what is searched. On images there is one for each head."""

    mode: Mode
    name: str
    fixed: Settings
    """Settings that are not searched."""
    axes: dict[str, Axis]
    """Setting -> what is tried; every combination is on the grid."""
    head: Head = "simclr_bn"
    start: str = ""
    """The method whose choice its search begins from; empty: a grid of its own."""
    on: On = "glyphs"
    wrong: int = 0
    """Percentage of wrong captions in what it learns from, also in its search, which has TRIALS_UNDER_NOISE runs."""
    trials: int = 0
    """Runs of its search where it is of the comparison on real data, each a quarter as long as a compared one."""

    @property
    def label(self) -> str:
        """Its name on the page."""
        if self.on not in ("glyphs", "emoji"):
            return f"{self.name}, {self.on}"
        return self.name if self.mode == "bimodal" or self.head == "simclr_bn" else f"{self.name}, linear head"

    @property
    def data(self) -> tuple[Data, Data]:
        """What it is searched on, and what it is compared on."""
        of_glyphs = "development", "long-tailed"
        for_search, for_comparison = of_glyphs if self.on == "glyphs" else (f"{self.on}-development", self.on)
        ending = f"@{self.wrong}" if self.wrong else ""
        return for_search + ending, for_comparison + ending

    def grid(self) -> list[Settings]:
        values = product(*(axis.values for axis in self.axes.values()))
        return [dict(zip(self.axes, each, strict=True)) for each in values]


def word(value: object) -> str:
    """A setting's value as the page shows it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def searched(
    mode: Mode, name: str, axes: dict[str, Axis], fixed: Settings | None = None, *, objective: str = "", start: str = ""
) -> Method:
    """Return a method.

    `fixed` and the keys of the axes are settings of the objective; those with a dot, and epochs, are any.
    """
    own = {"name": objective or name, "mode": mode} | (fixed or {})
    return Method(mode, name, {_key(key): value for key, value in own.items()},
                  {_key(key): axis for key, axis in axes.items()}, start=start)  # fmt: skip


def _key(key: str) -> str:
    return key if "." in key or key == "epochs" else f"objective.{key}"


_TAU = Axis((0.05, 0.1, 0.2, 0.4))
_FAST, _SLOW = Axis((4e-3, 8e-3, 16e-3)), Axis((2e-3, 4e-3, 8e-3))
_SCALE = Axis((2.8, 2.1, 1.4, 0.7), limits=(0.0, 4.6), shift=0.7)
"""Of the first tau 0.06, 0.12, 0.25, 0.5; the objective keeps it within 0 and log(100)."""
_ESTIMATOR = {"gamma": 0.8, "eps": 0.0}
_ISOGCLR = _ESTIMATOR | {"tau_max": 1.0, "beta_u": 0.9}
_ON_IMAGES = _ISOGCLR | {"tau_init": 0.1, "tau_min": 0.05, "tau_step": 0.3, "grad_clip": 3.0}
_ON_PAIRS = _ISOGCLR | {"tau_init": 0.05, "tau_min": 0.005, "tau_step": 0.1, "grad_clip": 5.0}
_AUC = {"similarity": "cos", "views": "across", "negatives": "weighted", "alpha": 0.5, "learn_b": True, "b": 0.0}

METHODS = (
    searched("unimodal", "simclr", {"tau": _TAU, RATE: _FAST}),
    searched("unimodal", "sogclr", {"tau": _TAU, RATE: _FAST}, _ESTIMATOR),
    searched("unimodal", "isogclr", {"rho": Axis((0.8, 1.6, 2.4), 1.5), "eta": Axis((0.02, 0.1), 5.0),
                                    RATE: Axis((4e-3, 8e-3))}, _ON_IMAGES),
    searched("unimodal", "decl", {"auxiliary": Axis(("sample", "mean"), 0), "tau": Axis((0.1, 0.2)), RATE: _FAST},
            {"gamma": 0.8}),
    searched("unimodal", "auc_cl", {"p": Axis((2.0, 8.0, 32.0), 4.0), "a": Axis((1.0, 10.0), 10.0, (0.0, 20.0)),
                                   RATE: Axis((4e-3, 8e-3))}, _AUC),
    searched("unimodal", "dcl", {"tau": _TAU, RATE: _FAST}, start="simclr"),
    searched("unimodal", "flatnce", {"tau": _TAU, RATE: _FAST}, start="simclr"),
    searched("unimodal", "spectral", {"mu": Axis((1.0, 10.0), 10.0), RATE: _FAST}, start="simclr"),
    searched("bimodal", "clip", {"log_logit_scale": _SCALE, RATE: _SLOW}),
    searched("bimodal", "sogclr", {"tau": _TAU, RATE: _SLOW}, _ESTIMATOR),
    searched("bimodal", "isogclr", {"rho": Axis((1.0, 2.0, 4.0)), "eta": Axis((0.005, 0.02), 4.0),
                                   RATE: Axis((2e-3, 4e-3))}, _ON_PAIRS),
)  # fmt: skip
METHOD: dict[tuple[Mode, str], Method] = {(method.mode, method.name): method for method in METHODS}

PLAIN = searched("bimodal", "clip, plain temperatures", {RATE: Axis((4e-3,))},
                objective="reproduction.plain_temperature:PlainTemperature")  # fmt: skip
"""Not searched: what iSogCLR's appendix C.3 says of it is that it does not converge."""


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


def train_run(method: Method, chosen: Settings, data: Data, *, seed: int = 0, batch: int = BATCH) -> Run:
    """A method's run."""
    shards = min(8, batch // 16)  # as by default: no fewer than 16 samples of each are in a batch
    epochs = EPOCHS[method.mode] if method.on == "glyphs" else EPOCHS_ON.get(method.on, EPOCHS_ON_DRAWINGS)
    if method.trials and is_searched_on(data):
        epochs //= 4
    varied = {"seed": seed, "epochs": epochs, "batch_size": batch, "order.canonical_shards": shards}
    head = {"model.head": method.head, "model.head_width": WIDTH_OF_HEAD[method.head]}
    of_mode = SHARED_OF[method.mode] | (head if method.mode == "unimodal" else {})
    return Run(data, SHARED | of_mode | varied | method.fixed | chosen)


def untrained_settings(mode: Mode) -> Settings:
    """The settings of every run of a mode that encoders and views follow from."""
    return SHARED | SHARED_OF[mode] | {"seed": 0, "objective.mode": mode}


def baseline_run(mode: Mode, data: Data, baseline: str) -> Run:
    """baseline: `untrained`, the encoder's initial weights; `raw_pixels`, grey, less their mean."""
    return Run(data, {"objective.mode": mode, "baseline": baseline})
