"""Everything that is compared, part by part, in the order in which it is made: what decides a claim first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from . import plan
from .plan import BATCH, METHOD, PLAIN, RATE, Data, Method, Mode, Run, Settings
from .results import Results
from .search import chosen, search, trials_of

IMAGES, PAIRS = ("simclr", "sogclr", "isogclr", "decl", "auc_cl"), ("clip", "sogclr", "isogclr")
NAMES: dict[Mode, tuple[str, ...]] = {"unimodal": IMAGES, "bimodal": PAIRS}
SEEDS: dict[Mode, tuple[int, ...]] = {"unimodal": tuple(range(5)), "bimodal": tuple(range(10))}
FURTHER_SEEDS = tuple(range(5, 10))
FURTHER = ("simclr", "sogclr", "isogclr")
"""Methods on images with ten seeds, since the first claims are of these and five leave them undecided."""
SWEPT = ("simclr", "decl", "auc_cl")
BATCHES = (16, 32, 64, 128, 256)
SEARCHED_AT = {16: 16, 32: 16, 64: BATCH, BATCH: BATCH, 256: 256}
"""Batch size -> the one whose search its settings are from."""
BALANCED = ("simclr", "isogclr")
TAUS, RHOS, ALPHAS = (0.1, 0.7), (0.1, 0.4), (0.0, 0.1, 1.0)
"""Values of the papers' tables: iSogCLR's tau_init and SimCLR's tau (Table 8), rho (9); AUC-CL's alpha (11)."""
FEW_SEEDS = (0, 1, 2)
BESIDE = {"dcl": FEW_SEEDS, "flatnce": (0,), "spectral": (0,)}
"""Methods on images that are shown beside the others, and their seeds: there is a claim about the first."""
DRAWN = tuple(METHOD["bimodal", name]._replace(on="drawings") for name in PAIRS)
"""The methods on pairs, on drawings."""
UNNORMALISED: Settings = {"objective.similarity": "distance", "objective.tau": 0.5}
"""The paper's, which searches nothing there (DeCL section 4.1)."""
NOISY: dict[str, Settings] = {
    name: {"objective.name": f"reproduction.noisy:Noisy{name.title()}", "objective.noise": 0.2}
    for name in ("simclr", "decl")
}
"""Gaussian noise on similarities (DeCL Figure 2)."""
PLAIN_SETTINGS: list[Settings] = [
    {"objective.tau_init": tau, "objective.eta": eta} for tau, eta in ((0.01, 1e-2), (0.05, 1e-3))
]
FOR_TAU: Settings = {"objective.rho": 2.4, "objective.eta": 0.02}
"""Settings of isogclr on images with which temperatures follow class size."""
SECONDS = 170
SECONDS_ON_DRAWINGS = 150
SECONDS_AT = {16: 400, 32: 260, 64: 200, 128: SECONDS, 256: 160}
"""What a run on images takes on one core, at this batch size."""

Runs = Iterator[Run | None]
"""None for a run that depends on scores that are missing."""


class Part(NamedTuple):
    """Runs that belong together."""

    name: str
    seconds: float
    """What a run of it takes on one core, as measured; for the estimate."""
    runs: Callable[[Results], Runs]
    """Its runs; the same number at any time."""


def parts(*, full: bool) -> list[Part]:
    """Return all parts; else those on pairs, without their search."""
    baselines = Part("nothing trained", 20, _baselines)
    if not full:
        return [baselines, _of_mode("bimodal")[1]]
    return [
        baselines,
        *_of_mode("unimodal"),
        Part("isogclr for temperatures, linear head", SECONDS, lambda results: (
            for_tau(seed) for seed in SEEDS["unimodal"]
        )),
        *_of_mode("bimodal"),
        *_of_batch(256),
        *_of_batch(16),
        *_of_batch(64),
        Part("search, images, linear head", SECONDS, lambda results: (
            run for name in IMAGES for run in trials(linear(name), results)
        )),
        Part("images, linear head", SECONDS, lambda results: (
            headline(linear(name), results, seed) for name in IMAGES for seed in SEEDS["unimodal"]
        )),
        Part("search, drawings", SECONDS_ON_DRAWINGS, lambda results: (
            run for method in DRAWN for run in trials(method, results)
        )),
        Part(f"drawings, {len(SEEDS['unimodal'])} seeds", SECONDS_ON_DRAWINGS, lambda results: (
            headline(method, results, seed) for seed in seeds_of(DRAWN[0]) for method in DRAWN
        )),
        Part("balanced classes", SECONDS, lambda results: (
            headline(METHOD["unimodal", name], results, seed, data="balanced")
            for name in BALANCED for seed in SEEDS["unimodal"]
        )),
        Part("images, batch 32, one seed", SECONDS_AT[32], lambda results: (
            swept(name, 32, 0, results) for name in SWEPT
        )),
        Part("pairs, plain temperatures", SECONDS, lambda results: map(plain, PLAIN_SETTINGS)),
        Part("images, settings of the papers' tables", SECONDS, lambda results: (
            headline(METHOD["unimodal", name], results, seed, changed=changed)
            for name, changed in varied() for seed in FEW_SEEDS
        )),
        Part(f"images, {len(FURTHER_SEEDS)} further seeds", SECONDS, lambda results: (
            headline(METHOD["unimodal", name], results, seed) for seed in FURTHER_SEEDS for name in FURTHER
        )),
        Part("search, images, others", SECONDS, lambda results: (
            run for name in BESIDE for run in trials(METHOD["unimodal", name], results)
        )),
        Part("images, others", SECONDS, lambda results: (
            headline(METHOD["unimodal", name], results, seed) for name, seeds in BESIDE.items() for seed in seeds
        )),
    ]  # fmt: skip


def runs_of(planned: list[Part], results: Results) -> list[Run | None]:
    """The runs of these parts, each once, in order; then None for each that is not known yet."""
    every = [run for part in planned for run in part.runs(results)]
    known = {run.key: run for run in every if run is not None}
    return [*known.values(), *(None for run in every if run is None)]


def missing(planned: list[Part], results: Results) -> list[Run | None]:
    """The runs of these parts that are not made, as `runs_of` gives them."""
    return [run for run in runs_of(planned, results) if run is None or results.of(run) is None]


# What is compared


def headline(
    method: Method, results: Results, seed: int, *, data: Data | None = None, changed: Settings | None = None
) -> Run | None:
    """A method's run with the settings that its search chose, but for the changed ones; None while it is unfinished."""
    if (settings := chosen(method, results)) is None:
        return None
    return plan.train_run(method, settings | (changed or {}), data or method.data[1], seed=seed)


def seeds_of(method: Method) -> tuple[int, ...]:
    """The seeds of a method's compared runs, without further ones."""
    return BESIDE.get(method.name, SEEDS[method.mode if method.on == "glyphs" else "unimodal"])


def swept(name: str, batch: int, seed: int, results: Results) -> Run | None:
    """A method's run at a batch size, on images; None while what its settings are from is missing."""
    method = METHOD["unimodal", name]
    if (settings := chosen(method, results, SEARCHED_AT[batch])) is None:
        return None
    return plan.train_run(method, settings, "long-tailed", seed=seed, batch=batch)


def linear(name: str) -> Method:
    """A method on images with a linear head."""
    return METHOD["unimodal", name]._replace(head="linear")


def compared(mode: Mode) -> list[Method]:
    """The methods of a mode, on images with either head."""
    methods = [METHOD[mode, name] for name in NAMES[mode]]
    if mode == "bimodal":
        return methods
    return [*methods, *(METHOD[mode, name] for name in BESIDE), *map(linear, IMAGES)]


def for_tau(seed: int) -> Run:
    """A run of isogclr with the settings for temperatures, and a linear head."""
    return plan.train_run(linear("isogclr"), FOR_TAU | {RATE: 4e-3}, "long-tailed", seed=seed)


def plain(settings: Settings) -> Run:
    """A run of CLIP with plain temperatures, at the learning rate in the middle of CLIP's grid."""
    return plan.train_run(PLAIN, settings | {RATE: 4e-3}, "long-tailed")


def varied() -> list[tuple[str, Settings]]:
    """Methods on images, and what is changed of their chosen settings."""
    return [
        *(("isogclr", {"objective.tau_init": tau}) for tau in TAUS),
        *(("simclr", {"objective.tau": tau}) for tau in TAUS),
        *(("isogclr", {"objective.rho": rho}) for rho in RHOS),
        *(("auc_cl", {"objective.alpha": alpha}) for alpha in ALPHAS),
        *((name, UNNORMALISED) for name in ("simclr", "decl")),
        *NOISY.items(),
    ]


# Its parts


def _baselines(results: Results) -> Runs:
    sets: list[tuple[Mode, Data]] = [("unimodal", "long-tailed"), ("bimodal", "long-tailed"), ("unimodal", "balanced")]
    on_glyphs = (plan.baseline_run(mode, data, name) for mode, data in sets for name in plan.BASELINES)
    return chain(on_glyphs, [plan.baseline_run("bimodal", "drawings", "untrained")])


def trials(method: Method, results: Results, batch: int = BATCH) -> Runs:
    found = search(method, results, batch)
    yield from found.runs if found is not None else [None] * trials_of(method, batch)


def _of_mode(mode: Mode) -> list[Part]:
    methods = [METHOD[mode, name] for name in NAMES[mode]]
    seeds = SEEDS[mode]
    return [
        Part(f"search, {plan.WORDS[mode]}", SECONDS, lambda results: (
            run for method in methods for run in trials(method, results)
        )),
        Part(f"{plan.WORDS[mode]}, {len(seeds)} seeds", SECONDS, lambda results: (
            headline(method, results, seed) for seed in seeds for method in methods
        )),
    ]  # fmt: skip


def _of_batch(batch: int) -> list[Part]:
    seeds = SEEDS["unimodal"]
    of_seeds = Part(f"images, batch {batch}, {len(seeds)} seeds", SECONDS_AT[batch], lambda results: (
        swept(name, batch, seed, results) for seed in seeds for name in SWEPT
    ))  # fmt: skip
    if SEARCHED_AT[batch] != batch:
        return [of_seeds]
    return [
        Part(f"search, images, batch {batch}", SECONDS_AT[batch], lambda results: (
            run for name in SWEPT for run in trials(METHOD["unimodal", name], results, batch)
        )),
        of_seeds,
    ]  # fmt: skip
