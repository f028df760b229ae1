"""What is compared on icons, glyphs and Fashion-MNIST, in the order in which it is made: what decides most first.

A variant is a method with the settings that its search chose, or that of another method with the same objective but for
what is compared: gamma's schedule, or how a temperature moves. Searches are a quarter as long as the compared runs.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from .plan import (
    BASELINES,
    EPOCHS,
    METHOD,
    RATE,
    VARIED,
    Axis,
    Data,
    Method,
    On,
    Run,
    Settings,
    baseline_run,
    searched,
    train_run,
)
from .results import Results
from .schedule import Part, Runs
from .search import chosen, search, trial

TRIALS, SEEDS, FURTHER_SEEDS = 8, (0, 1, 2), (3, 4)
"""Of a search; of every variant; of those besides that three seeds leave a claim undecided about."""
RHOS, POWERS = (0.1, 0.3, 1.0, 2.0, 4.0), (-0.5, 0.25, 0.5, 1.0)
"""Of temperatures that are learned; of the solved ones, of which 0 is SogCLR."""
SHARES = (20, 40)
SECONDS_ON: dict[On, float] = {"glyphs": 155, "icons": 310, "fashion": 230}
"""What a compared run takes on one core: of icons at 1,500 a second, and 40 seconds of scoring."""
SEARCHED: dict[On, float] = {"glyphs": 65, "icons": 95, "fashion": 75}
SHORT: Settings = {"epochs": int(epochs)} if (epochs := os.environ.get("REAL_DATA_EPOCHS")) else {}
"""For tests: the epochs of every run."""
_OF: dict[On, Settings] = {
    "glyphs": {},
    "icons": {"batch_size": 256, "order.canonical_shards": 8},
    "fashion": {"data.recipe": "simclr_cifar"},
}
_FAST, _TAU, _RHO = Axis((4e-3, 8e-3)), Axis((0.05, 0.1)), Axis((1.0, 2.0))
_SCALE = Axis((2.8, 2.1), limits=(0.0, 4.6), shift=0.7)
_SOGCLR: Settings = {"gamma": 0.8, "eps": 0.0}
_ISOGCLR = _SOGCLR | {"tau_max": 1.0, "beta_u": 0.9, "tau_init": 0.05, "tau_min": 0.005, "grad_clip": 5.0}
_VISITED = {"eta": 0.02, "tau_step": 0.3}
"""Of iSogCLR on icons, each of which is seen four times; a glyph is 32 times."""
_V3: Settings = {"eta": 2e-3}
"""Ten times the paper's, whose runs have more than ten times as many steps."""
CONSTANT: Settings = {"objective.gamma_schedule": "constant", "objective.gamma": 0.6}
"""Gamma as the paper's searches chose it for most (FastCLIP table 8)."""


def _method(on: On, name: str, axes: dict[str, Axis], fixed: Settings | None = None, objective: str = "") -> Method:
    return _here(searched("bimodal", name, axes, fixed, objective=objective), on)


def _here(method: Method, on: On, fixed: Settings | None = None) -> Method:
    """A method with a search of this comparison's."""
    return method._replace(on=on, trials=TRIALS, fixed=method.fixed | _OF[on] | (fixed or {}) | SHORT)


CLIP = _method("icons", "clip", {"log_logit_scale": _SCALE, RATE: _FAST})
FIXED = _method("icons", "clip, fixed", {"log_logit_scale": _SCALE, RATE: _FAST}, {"learn_scale": False}, "clip")
SOGCLR = _method("icons", "sogclr", {"tau": _TAU, RATE: _FAST}, _SOGCLR)
ISOGCLR = _method("icons", "isogclr", {"rho": Axis((0.5, 1.0, 2.0)), RATE: _FAST}, _ISOGCLR | _VISITED)
V3, GLYPHS_V3 = (_method(on, "fastclip_v3", {"rho": _RHO, RATE: _FAST}, _V3) for on in ("icons", "glyphs"))
V1 = _method("glyphs", "fastclip_v1", {"tau": _TAU, RATE: _FAST})
V2 = _method("glyphs", "fastclip_v2", {"rho": _RHO, RATE: _FAST}, {"tau_init": 0.05})
OPTIMISED = {
    name: _method("glyphs", f"fastclip_v3, {name}", {"rho": _RHO, RATE: rate}, _V3 | {"optimizer.name": name} | more,
                  "fastclip_v3")
    for name, rate, more in (
        ("lamb", Axis((4e-3, 16e-3)), {}),
        ("lion", Axis((2e-4, 8e-4)), {"optimizer.betas": [0.9, 0.99], "optimizer.weight_decay": 0.06}),
        ("sgd", Axis((0.1, 0.4)), {"optimizer.betas": "none", "optimizer.weight_decay": 3e-6}),
    )
}  # fmt: skip
"""Weight decay is to AdamW's as in FastCLIP's table 10."""
IMAGES = {
    name: _here(METHOD["unimodal", name]._replace(axes=axes | {RATE: _FAST}), "fashion", fixed)
    for name, axes, fixed in (
        ("simclr", {"objective.tau": Axis((0.1, 0.2))}, {}),
        ("sogclr", {"objective.tau": Axis((0.1, 0.2))}, {}),
        ("isogclr", {"objective.rho": Axis((0.4, 0.8, 1.6))}, {"objective.eta": 0.02}),
        ("decl", {"objective.tau": Axis((0.1, 0.2))}, {"objective.auxiliary": "sample"}),
        ("auc_cl", {"objective.p": Axis((8.0, 32.0), 4.0)}, {"objective.a": 1.0}),
    )
}
PAIRS_OF_GLYPHS = {name: METHOD["bimodal", name] for name in ("sogclr", "isogclr")}
"""Their settings are what the committed search chose."""


class Variant(NamedTuple):
    """What is compared."""

    method: Method
    """What its search chose is used."""
    changed: Settings = {}
    """With another objective.name the method's own settings of its objective are left out."""
    names: dict[str, str] | None = None
    """The chosen settings that are used, and their names here; None: all, by their own."""
    data: Data = ""
    """Empty: that of the method."""
    seeds: tuple[int, ...] = SEEDS


def _by(name: str, **settings: object) -> Settings:
    return {
        "objective.name": name,
        "objective.mode": "bimodal",
        **{f"objective.{key}": of for key, of in settings.items()},
    }


_RATE_ALONE, _AS_FIRST = {RATE: RATE}, {RATE: RATE, "objective.tau": "objective.tau_init"}
_SOLVED = _by("isogclr", **_ISOGCLR | {"eta": 0.0, "rho": 1.0})
VARIANTS: dict[str, Variant] = {
    "icons clip": Variant(CLIP),
    "icons clip fixed": Variant(FIXED),
    "icons sogclr": Variant(SOGCLR),
    "icons isogclr": Variant(ISOGCLR),
    "icons v0": Variant(V3, _by("fastclip_v0", tau=0.07), _RATE_ALONE),
    "icons v1": Variant(SOGCLR, _by("fastclip_v1")),
    "icons v2": Variant(ISOGCLR, _by("fastclip_v2", tau_init=0.05)),
    "icons v3": Variant(V3),
    "icons v1 constant": Variant(SOGCLR, _by("fastclip_v1") | CONSTANT),
    "icons v3 constant": Variant(V3, CONSTANT),
    "glyphs v0": Variant(GLYPHS_V3, _by("fastclip_v0", tau=0.07), _RATE_ALONE),
    "glyphs v1": Variant(V1),
    "glyphs v2": Variant(V2),
    "glyphs v3": Variant(GLYPHS_V3),
    **{f"glyphs {name} constant": Variant(of, CONSTANT) for name, of in (("v1", V1), ("v2", V2), ("v3", GLYPHS_V3))},
    **{f"glyphs v3 {name}": Variant(of) for name, of in OPTIMISED.items()},
    **{f"fashion {name}": Variant(of) for name, of in IMAGES.items()},
    **{f"icons isogclr {share}": Variant(ISOGCLR, data=f"icons@{share}") for share in SHARES},
    **{f"icons doubt {share}": Variant(ISOGCLR, {"objective.doubt_after": 2}, data=f"icons@{share}" if share else "")
       for share in (0, *SHARES)},
    **{f"icons power {power:g}": Variant(SOGCLR, _SOLVED | {VARIED: power}, _AS_FIRST) for power in POWERS},
    "glyphs sogclr": Variant(PAIRS_OF_GLYPHS["sogclr"]),
    **{f"glyphs power {power:g}": Variant(PAIRS_OF_GLYPHS["sogclr"], _SOLVED | {VARIED: power}, _AS_FIRST)
       for power in POWERS},
    **{f"{on} rho {rho:g}": Variant(of, {"objective.rho": rho}) for rho in RHOS
       for on, of in (("glyphs", PAIRS_OF_GLYPHS["isogclr"]), ("fashion", IMAGES["isogclr"]))},
    **{f"all {name}": Variant(of, {"epochs": 8}, data="icons-all", seeds=(0,))
       for name, of in (("clip", CLIP), ("sogclr", SOGCLR), ("isogclr", ISOGCLR), ("v3", V3))},
}  # fmt: skip
"""Name, which begins with the data -> what is compared."""
SEARCHES = {"icons": (CLIP, FIXED, SOGCLR, ISOGCLR, V3), "glyphs": (V1, V2, GLYPHS_V3), "optimisers": tuple(OPTIMISED.values()),
            "fashion": tuple(IMAGES.values())}  # fmt: skip
WHOLE = (V1, GLYPHS_V3)
"""Methods whose trials are made at the whole length too."""


def compared(name: str, results: Results, seed: int) -> Run | None:
    """A variant's run; None while its search is unfinished."""
    method, changed, names, data, _ = VARIANTS[name]
    if (found := chosen(method, results)) is None:
        return None
    settings = found if names is None else {new: found[key] for key, new in names.items()}
    fixed = {key: value for key, value in method.fixed.items() if not key.startswith("objective.")}
    method = method._replace(fixed=fixed if "objective.name" in changed else method.fixed)
    return train_run(method, settings | changed | SHORT, data or method.data[1], seed=seed)


def whole(method: Method, results: Results) -> list[Run | None]:
    """The trials of a method's search as long as compared runs are."""
    found = search(method, results)
    assert found is not None, "it begins from its own grid"
    runs = [trial(method, settings, found.batch) for settings in found.tried]
    longer = [run._replace(settings=run.settings | {"epochs": EPOCHS["bimodal"]} | SHORT) for run in runs]
    return [*longer, *[None] * (found.size - len(longer))]


def parts() -> list[Part]:
    """Everything that is compared, but for further seeds."""
    on_icons = SECONDS_ON["icons"]
    return [
        Part("nothing trained", 60, _baselines),
        _searches("icons"),
        _variants("icons, 100,000, 3 seeds", on_icons, "icons", "clip", "clip fixed", "sogclr", "isogclr", "v0", "v1", "v2", "v3",
                  "v1 constant", "v3 constant"),
        _searches("glyphs"),
        _variants("glyphs, FastCLIP's tables 3 and 4", SECONDS_ON["glyphs"], "glyphs", "v0", "v1", "v2", "v3", "v1 constant",
                  "v2 constant", "v3 constant"),
        _searches("fashion"),
        _variants("fashion, long-tailed", SECONDS_ON["fashion"], "fashion", *IMAGES),
        _variants("icons, solved temperatures", on_icons + 120, "icons", *(f"power {power:g}" for power in POWERS)),
        _variants("glyphs, solved temperatures", SECONDS_ON["glyphs"] + 30, "glyphs", "sogclr",
                  *(f"power {power:g}" for power in POWERS)),
        _variants("icons, wrong captions and doubt", on_icons, "icons",
                  "doubt 0", *(f"{name} {share}" for share in SHARES for name in ("isogclr", "doubt"))),
        _searches("optimisers"),
        _variants("glyphs, FastCLIP's table 5", SECONDS_ON["glyphs"], "glyphs", *(f"v3 {name}" for name in OPTIMISED)),
        *(_variants(f"{on}, rho", SECONDS_ON[on], on, *(f"rho {rho:g}" for rho in RHOS)) for on in ("glyphs", "fashion")),
        Part("glyphs, trials at whole length", SECONDS_ON["glyphs"], lambda results: (
            run for method in WHOLE for run in whole(method, results)
        )),
        _variants("all icons, 8 epochs, one seed", 2050, "all", "clip", "sogclr", "isogclr", "v3"),
    ]  # fmt: skip


def _baselines(results: Results) -> Runs:
    yield baseline_run("bimodal", "icons", "untrained")
    for mode, data in (("bimodal", "long-tailed"), ("unimodal", "fashion")):
        yield from (baseline_run(mode, data, name) for name in BASELINES)  # type: ignore[arg-type]


def _searches(of: str) -> Part:
    def runs(results: Results) -> Runs:
        for method in SEARCHES[of]:
            found = search(method, results)
            assert found is not None, "it begins from its own grid"
            yield from found.runs

    return Part(f"search, {of}", SEARCHED[SEARCHES[of][0].on], runs)


def _variants(name: str, seconds: float, on: str, *variants: str) -> Part:
    def runs(results: Results) -> Runs:
        names = [f"{on} {variant}" for variant in variants]
        yield from (compared(each, results, seed) for seed in VARIANTS[names[0]].seeds for each in names)

    return Part(name, seconds, runs)
