"""Everything that is compared, part by part, in the order in which it is made: that of the page's claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import Any, NamedTuple

from reproduction import plan
from reproduction.plan import BATCH, METHOD, METHODS, MODES, RATE, SEEDS, Data, Length, Method, Mode, Run, Settings
from reproduction.results import Results
from reproduction.search import chosen, score_of_search, trials

CORE: dict[Mode, tuple[str, ...]] = {
    "unimodal": (
        "simclr", "sogclr", "isogclr", "isogclr, wide", "isogclr, for tau", "decl, sampled", "decl, mean", "auc_cl",
        "auc_cl, code",
    ),
    "bimodal": ("clip", "sogclr", "isogclr"),
}  # fmt: skip
FORMS = {
    "isogclr": ("isogclr", "isogclr, wide"),
    "decl": ("decl, sampled", "decl, mean"),
    "auc_cl": ("auc_cl", "auc_cl, code"),
}
"""Methods with several forms; claims are about the one that the search prefers."""
SWEPT, SEARCHED_AGAIN = ("simclr", "sogclr", "isogclr", "decl", "auc_cl"), ("simclr", "decl", "auc_cl")
BATCHES = (16, 32, 64, 128, 256)
SEARCHED_AT = {16: 16, 32: 16, 64: BATCH, BATCH: BATCH, 256: 256}
"""Batch size -> the one whose search its settings are from, for the methods that are searched again."""
BALANCED = ("simclr", "sogclr", "isogclr")
OTHER_TAU_INIT: dict[Mode, float] = {"unimodal": 0.2, "bimodal": 0.2}
CONSTANT_GAMMA = {"objective.gamma_decay_epochs": "none", "objective.gamma_min": "none", "objective.gamma": 0.6}
"""FastCLIP's rivals (appendix B); they keep the other settings of the version with a cosine."""
WITH_COSINE = ("fastclip_v1", "fastclip_v2", "fastclip_v3")
OPTIMIZERS = {"adamw": (2e-3, 0.02), "lion": (4e-4, 0.06), "lamb": (4e-3, 0.02), "sgd": (0.2, 3e-6)}
"""Middle learning rate and weight decay; the decays relate to AdamW's about as FastCLIP's do."""
SECONDS = 110
SECONDS_AT = {16: 280, 32: 180, 64: 130, 128: SECONDS, 256: 100}
"""What a run on images with equal epochs takes on one core, at this batch size."""

Runs = Iterator[Run | None]
"""None for a run that depends on scores that are missing."""


class Part(NamedTuple):
    """Runs that belong together."""

    name: str
    seconds: float
    """What a run of it takes on one core, as measured; for the estimate."""
    runs: Callable[[Results], Runs]
    """Its runs; about the same number at any time."""


def parts(*, full: bool) -> list[Part]:
    """Return all parts; else those for three quarters of an hour, which the claims of iSogCLR on pairs need."""
    baselines, pairs = Part("nothing trained", 20, _baselines), _of_methods("bimodal", CORE["bimodal"])
    if not full:
        return [baselines, *pairs]
    return [baselines, *_of_methods("unimodal", CORE["unimodal"]), *pairs, *_sweep(), *_others()]


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
    mode: Mode,
    label: str,
    results: Results,
    *,
    seed: int = 0,
    data: Data = "long-tailed",
    changed: Settings | None = None,
) -> Run | None:
    """A method's run with the settings that its search chose, but for the changed ones; None while it is unfinished."""
    if (settings := chosen(METHOD[mode, label], results)) is None:
        return None
    return plan.train_run(METHOD[mode, label], settings | (changed or {}), data, seed=seed)


def best_headline(mode: Mode, name: str, results: Results, **named: Any) -> Run | None:
    """The run of `headline` of the form that the search prefers, on images; None while a search is unfinished."""
    method = form_of(name, results) if mode == "unimodal" else METHOD[mode, name]
    return None if method is None else headline(mode, method.label, results, **named)


def swept(name: str, batch: int, length: Length, results: Results) -> Run | None:
    """A method's run at a batch size, on images; None while what its settings are from is missing.

    A method that is not searched again keeps its settings and takes a learning rate that grows with the root of the
    batch size.
    """
    if (method := form_of(name, results)) is None:
        return None
    again = name in SEARCHED_AGAIN
    if (settings := chosen(method, results, SEARCHED_AT[batch] if again else BATCH)) is None:
        return None
    if not again:
        settings = settings | {RATE: settings[RATE] * math.sqrt(batch / BATCH)}
    return plan.train_run(method, settings, "long-tailed", batch=batch, length=length)


def form_of(name: str, results: Results) -> Method | None:
    """The form of a method that has the best score of the search at BATCH; None while it is unfinished."""
    forms = [METHOD["unimodal", label] for label in FORMS.get(name, (name,))]
    scores = [score_of_search(form, results) for form in forms]
    known = [score for score in scores if score is not None]
    return forms[known.index(max(known))] if len(known) == len(forms) else None


def with_optimizer(name: str, results: Results) -> Method | None:
    """FastCLIP-v3 with another optimiser, whose learning rate is searched; None while v3's own search is unfinished."""
    method = METHOD["bimodal", "fastclip_v3"]
    if (settings := chosen(method, results)) is None:
        return None
    rate, decay = OPTIMIZERS[name]
    own = {"optimizer.name": name, "optimizer.weight_decay": decay}
    fixed = method.fixed | {key: value for key, value in settings.items() if key != RATE} | own
    return Method("bimodal", f"fastclip_v3, {name}", fixed, {RATE: (rate / 4, rate, 4 * rate)})


def optimized(name: str, seed: int, results: Results) -> Run | None:
    """A run of FastCLIP-v3 with an optimiser and the learning rate that its search chose."""
    if (method := with_optimizer(name, results)) is None or (settings := chosen(method, results)) is None:
        return None
    return plan.train_run(method, settings, "long-tailed", seed=seed)


# Its parts


def _baselines(results: Results) -> Runs:
    sets: list[tuple[Mode, Data]] = [("unimodal", "long-tailed"), ("bimodal", "long-tailed"), ("unimodal", "balanced")]
    return (plan.baseline_run(mode, data, name) for mode, data in sets for name in plan.BASELINES)


def _of_methods(mode: Mode, labels: tuple[str, ...]) -> list[Part]:
    methods = [METHOD[mode, label] for label in labels]
    names = f"{plan.WORDS[mode]}: {labels[0]} and {len(labels) - 1} more"
    return [
        Part(f"search, {names}", SECONDS, lambda results: _searches(methods, results, BATCH)),
        Part(f"three seeds, {names}", SECONDS, lambda results: (
            headline(mode, label, results, seed=seed) for label in labels for seed in SEEDS
        )),
    ]  # fmt: skip


def _searches(methods: Iterable[Method | None], results: Results, batch: int) -> Runs:
    for method in methods:
        yield from trials(method, results, batch) if method else [None] * plan.TRIALS


def _sweep() -> list[Part]:
    lengths: tuple[Length, ...] = ("epochs", "steps")
    return [*map(_search_at, (max(BATCHES), min(BATCHES))), *map(_swept, lengths)]


def _search_at(batch: int) -> Part:
    return Part(f"search, images, batch {batch}", SECONDS_AT[batch], lambda results: (
        _searches((form_of(name, results) for name in SEARCHED_AGAIN), results, batch)
    ))  # fmt: skip


def _swept(length: Length) -> Part:
    batches = (min(BATCHES), max(BATCHES), 32, 64)  # the ends first: claims are about them
    seconds = fmean(SECONDS_AT[batch] * (1 if length == "epochs" else batch / BATCH) for batch in batches)
    return Part(f"batch sizes, equal {length}", seconds, lambda results: (
        swept(name, batch, length, results) for batch in batches for name in SWEPT
    ))  # fmt: skip


def _others() -> list[Part]:
    rest = [
        part
        for mode in reversed(MODES)  # pairs first: claims are about FastCLIP's versions
        for part in _of_methods(mode, tuple(m.label for m in METHODS if m.mode == mode and m.label not in CORE[mode]))
    ]
    return [
        Part("balanced classes", SECONDS, lambda results: (
            best_headline("unimodal", name, results, seed=seed, data="balanced") for name in BALANCED for seed in SEEDS
        )),
        Part("alpha = 0", SECONDS, lambda results: iter(
            [headline("unimodal", "auc_cl", results, changed={"objective.alpha": 0.0})]
        )),
        Part("another tau_init", SECONDS, lambda results: (
            headline(mode, "isogclr", results, changed={"objective.tau_init": OTHER_TAU_INIT[mode]}) for mode in MODES
        )),
        *rest,
        Part("a constant gamma", SECONDS, lambda results: (
            headline("bimodal", label, results, seed=seed, changed=CONSTANT_GAMMA)
            for label in WITH_COSINE for seed in SEEDS
        )),
        Part("search, optimisers", SECONDS, lambda results: (
            _searches([with_optimizer(name, results) for name in OPTIMIZERS], results, BATCH)
        )),
        Part("three seeds, optimisers", SECONDS, lambda results: (
            optimized(name, seed, results) for name in OPTIMIZERS for seed in SEEDS
        )),
    ]  # fmt: skip
