"""Learning from data with wrong captions: what is compared, in the order in which it is made.

Every method is searched where 40 % of the captions are wrong, on glyphs of another seed; the share is not known to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from .plan import (
    CURATED,
    DIVIDED_AFTER,
    RATE,
    RIGHT,
    TRIALS_OF_RIVAL,
    Axis,
    Method,
    On,
    Run,
    Settings,
    searched,
    train_run,
)
from .results import Results
from .schedule import SECONDS, SECONDS_ON_DRAWINGS, Part, Runs
from .search import chosen, search

SEARCHED_UNDER = 40
SHARES = {0: 5, 20: 3, 40: 5, 60: 3}
"""Percentage of wrong captions -> seeds, on glyphs."""
FEW_SEEDS = 3
REAL: tuple[On, ...] = ("drawings", "emoji")
REAL_SHARES, REAL_SEEDS = (0, 40), 5

DOUBT_AFTER = "objective.doubt_after"
_AFTER = {"doubt_after": Axis((4, 8))}
_SCALE = Axis((2.1, 1.4), limits=(0.0, 4.6), shift=0.7)
_TAU, _RATE, _SLOW = Axis((0.1, 0.2, 0.4)), Axis((2e-3, 4e-3)), Axis((4e-3,))
_ESTIMATOR: Settings = {"gamma": 0.8, "eps": 0.0}
_ISOGCLR: Settings = _ESTIMATOR | {
    "tau_max": 1.0, "beta_u": 0.9, "tau_init": 0.05, "tau_min": 0.005, "tau_step": 0.1, "grad_clip": 5.0
}  # fmt: skip
_OF_ISOGCLR = {"rho": Axis((1.0, 2.0)), "eta": Axis((0.005, 0.02), 4.0)}


def _method(name: str, axes: dict[str, Axis], fixed: Settings | None = None, *, objective: str = "") -> Method:
    found = searched("bimodal", name, axes, fixed, objective=objective)
    return found._replace(wrong=SEARCHED_UNDER)


CLIP = _method("clip", {"log_logit_scale": _SCALE, "learned": Axis((True, False), 0),
                        "epochs": Axis((16, 32), 0), "label_smoothing": Axis((0.0,), limits=(0.0, 0.5), shift=0.1),
                        RATE: _SLOW}, objective="reproduction.smoothed:SmoothedClip")  # fmt: skip
SOGCLR = _method("sogclr", {"tau": _TAU, RATE: _RATE}, _ESTIMATOR)
ISOGCLR = _method("isogclr", _OF_ISOGCLR | {RATE: _RATE}, _ISOGCLR)
CLIP_DOUBT = _method("clip, doubt", {"log_logit_scale": _SCALE, RATE: _RATE} | _AFTER, objective="clip")
SOGCLR_DOUBT = _method("sogclr, doubt", {"tau": _TAU, RATE: _SLOW} | _AFTER, _ESTIMATOR, objective="sogclr")
ISOGCLR_DOUBT = _method("isogclr, doubt", _OF_ISOGCLR | {RATE: _SLOW} | _AFTER, _ISOGCLR, objective="isogclr")
METHODS = (CLIP, CLIP_DOUBT, ISOGCLR, ISOGCLR_DOUBT)
SOGCLRS = (SOGCLR, SOGCLR_DOUBT)
"""These are compared at one share, and by few seeds."""
RIVALLED = (CLIP_DOUBT, ISOGCLR_DOUBT)
ON_REAL_DATA = (CLIP, ISOGCLR, ISOGCLR_DOUBT)


def parts() -> list[Part]:
    """Everything that is compared."""
    seeds, few = range(SHARES[SEARCHED_UNDER]), range(FEW_SEEDS)
    return [
        Part(f"search, {SEARCHED_UNDER} % wrong", SECONDS, _search),
        *(Part(f"glyphs, {share} % wrong, {count} seeds", SECONDS, _of_glyphs(METHODS, share, range(count)))
          for share, count in SHARES.items()),
        *(Part(f"glyphs, without the {share} % that are wrong", SECONDS,
               _of_glyphs([ISOGCLR], share, range(count), right=True)) for share, count in SHARES.items() if share),
        Part(f"glyphs, {SEARCHED_UNDER} % wrong, sogclr", SECONDS, _of_glyphs(SOGCLRS, SEARCHED_UNDER, few)),
        Part("drawings and emoji", SECONDS_ON_DRAWINGS, _of_real_data(ON_REAL_DATA, REAL_SHARES)),
        Part(f"drawings and emoji, without the {SEARCHED_UNDER} % that are wrong", SECONDS_ON_DRAWINGS,
             _of_real_data([ISOGCLR], [SEARCHED_UNDER], right=True)),
        Part(f"search, {SEARCHED_UNDER} % wrong, division before every epoch", 2 * SECONDS, _search_of_rivals),
        Part(f"glyphs, {SEARCHED_UNDER} % wrong, division before every epoch", 2 * SECONDS, lambda results: (
            divided(method, results, SEARCHED_UNDER, seed) for seed in seeds for method in RIVALLED
        )),
        Part("glyphs, 0 % wrong, division before every epoch", 2 * SECONDS, lambda results: (
            divided(ISOGCLR_DOUBT, results, 0, seed) for seed in few
        )),
        Part(f"glyphs, {SEARCHED_UNDER} % wrong, curated by a first run", 2 * SECONDS, lambda results: (
            curated(results, seed) for seed in few
        )),
    ]  # fmt: skip


def rival(method: Method, results: Results) -> Method | None:
    """Division in the place of a method's doubt, from the settings that this one's search chose; None before that."""
    if (start := chosen(method, results)) is None:
        return None
    kept = {key: value for key, value in start.items() if key != DOUBT_AFTER}
    axes = {DIVIDED_AFTER: _AFTER["doubt_after"]}
    axes |= {key: method.axes[key]._replace(values=(value,)) for key, value in kept.items()}
    return method._replace(name=method.name.replace("doubt", "division"), axes=axes, start=method.name)


def divided(method: Method, results: Results, share: int, seed: int) -> Run | None:
    """The run of a method's rival."""
    found = rival(method, results)
    return None if found is None else compared(found, results, share, seed)


def curated(results: Results, seed: int) -> Run | None:
    """The run of isogclr without the misfits of a first one, as a user makes it by hand."""
    run = compared(ISOGCLR, results, SEARCHED_UNDER, seed)
    return None if run is None else run._replace(settings=run.settings | {CURATED: True})


def compared(method: Method, results: Results, share: int, seed: int, *, right: bool = False) -> Run | None:
    """A method's run on data of which a share of the captions is wrong; None while its search is unfinished.

    right: on those alone that are not wrong. On drawings and emoji with the settings that were chosen on glyphs.
    """
    settings = chosen(method._replace(on="glyphs"), results)
    data = method._replace(wrong=share).data[1] + (RIGHT if right else "")
    return None if settings is None else train_run(method, settings, data, seed=seed)


def _search(results: Results) -> Runs:
    for method in (*METHODS, *SOGCLRS):
        found = search(method, results)
        assert found is not None, "it begins from its own grid"
        yield from found.runs


def _search_of_rivals(results: Results) -> Runs:
    for method in RIVALLED:
        found = rival(method, results)
        of_rival = None if found is None else search(found, results)
        yield from [None] * TRIALS_OF_RIVAL if of_rival is None else of_rival.runs


def _of_glyphs(
    methods: Sequence[Method], share: int, seeds: Sequence[int], *, right: bool = False
) -> Callable[[Results], Runs]:  # fmt: skip
    def runs(results: Results) -> Runs:
        for seed, method in product(seeds, methods):
            yield compared(method, results, share, seed, right=right)

    return runs


def _of_real_data(
    methods: Sequence[Method], shares: Sequence[int], *, right: bool = False
) -> Callable[[Results], Runs]:  # fmt: skip
    def runs(results: Results) -> Runs:
        for seed, on, share, method in product(range(REAL_SEEDS), REAL, shares, methods):
            yield compared(method._replace(on=on), results, share, seed, right=right)

    return runs
