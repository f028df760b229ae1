"""What the papers claim, and what the runs have to say about it. Verdicts are computed, never written."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .comparison import ALL, Comparison, Estimate
from .plan import METHOD, Mode, Settings
from .results import RETRIEVAL, ZERO_SHOT, Measure, Result, Temperatures
from .schedule import (
    ALPHAS,
    BATCHES,
    DRAWN,
    FEW_SEEDS,
    NOISY,
    PLAIN_SETTINGS,
    RHOS,
    SEEDS,
    TAUS,
    UNNORMALISED,
    for_tau,
    linear,
    plain,
)

SHOWS = "shows"
REVERSED = "the reverse shows"
EQUIVALENT = "equivalent"
UNDECIDED = "undecided"
NO = "does not show"
NOT_CLEAR = "no verdict"
NOT_TESTED = "not tested"

SMALL, LARGE = min(BATCHES), max(BATCHES)
LEVEL = 1.0
"""Points: a difference whose whole interval is within them is none that matters."""
LONG_TAIL = 0.5
"""Skewness from which a distribution counts as skewed."""


class Finding(NamedTuple):
    """What was seen of a claim, and the verdict."""

    seen: str
    verdict: str


NOT_RUN = Finding("not run yet", NOT_TESTED)
UNCLEAR = Finding("the baseline is not clearly above raw pixels and an untrained encoder", NOT_CLEAR)
Check = Callable[[Comparison], Finding]


class Claim(NamedTuple):
    """A claim of a paper."""

    claim: str
    source: str
    reported: str
    check: Check | str
    """How the runs test it, or why they cannot."""

    def judge(self, runs: Comparison) -> Finding:
        return Finding(self.check, NOT_TESTED) if isinstance(self.check, str) else self.check(runs)


class Group(NamedTuple):
    """Claims with a picture."""

    name: str
    picture: str
    claims: list[Claim]


def verdict(estimate: Estimate) -> str:
    """Return the verdict on the claim that a figure is above 0."""
    if abs(estimate.points) > estimate.noise:
        return SHOWS if estimate.points > 0 else REVERSED
    return EQUIVALENT if abs(estimate.points) + estimate.noise <= LEVEL else UNDECIDED


def compared_runs(
    runs: Comparison, better: list[Result], worse: list[Result], measure: Measure | None = None, band: str = ALL
) -> Finding:
    """The claim that a method is above a baseline."""
    if (gap := runs.gap(better, worse, measure, band)) is None:
        return NOT_RUN
    if not runs.is_clear(worse, measure):
        return UNCLEAR
    tail = runs.gap(better, worse, measure, "tail") if band == ALL else None
    return Finding(signed(gap) + (f"; in the tail {signed(tail)}" if tail else ""), verdict(gap))


def _above(mode: Mode, better: str, worse: str, of: str = "") -> Check:
    """of: `zero_shot`, a score; `linear`, a head on images; `drawings`, a dataset of pairs."""
    methods = {method.name: method for method in DRAWN} if of == "drawings" else {
        name: linear(name) if of == "linear" else METHOD[mode, name] for name in (better, worse)
    }  # fmt: skip

    def check(runs: Comparison) -> Finding:
        first, second = (runs.seeds(methods[name]) for name in (better, worse))
        return compared_runs(runs, first, second, ZERO_SHOT if of == "zero_shot" else None)

    return check


def _above_at(better: str, worse: str, batch: int) -> Check:
    return lambda runs: compared_runs(runs, runs.swept(better, batch), runs.swept(worse, batch))


def _more_on_a_long_tail(runs: Comparison) -> Finding:
    """The training sets differ, so the two gains are of the same test samples and seeds only."""
    pairs = [[runs.seeds(METHOD["unimodal", name], data=data) for name in ("isogclr", "simclr")]
             for data in ("long-tailed", "balanced")]  # fmt: skip
    gains = [runs.gap(better, worse) for better, worse in pairs]
    more = runs.gain(*pairs)
    if more is None or gains[0] is None or gains[1] is None:
        return NOT_RUN
    if not all(runs.is_clear(pair[1]) for pair in pairs):
        return UNCLEAR
    return Finding(f"{signed(more)}: {signed(gains[0])}, balanced {signed(gains[1])}", verdict(more))


def _rare_is_cold(mode: Mode, of: str = "", figure: str = "spearman") -> Check:
    """The claim that tau grows with class size, in every seed and side: Spearman's correlation beside chance's.

    of: `for_tau`, the settings chosen for it, else those of the best score; `drawings`, a dataset of pairs.
    figure: `copies`, the claim that it grows with the number of a picture's near-copies.
    """
    method = next(each for each in DRAWN if each.name == "isogclr") if of == "drawings" else METHOD[mode, "isogclr"]

    def check(runs: Comparison) -> Finding:
        chosen = runs.all(map(for_tau, SEEDS[mode])) if of == "for_tau" else runs.seeds(method)
        sides = [side for result in chosen for side in result.temperatures.values()]
        if not sides:
            return NOT_RUN
        return goes_with(sides, figure, len(sides[0].sizes) if figure == "spearman" else sum(sides[0].sizes))

    return check


def goes_with(sides: Sequence[Temperatures], figure: str, ranked: int) -> Finding:
    """The claim that tau grows with something in every seed and side. ranked: how many there are of it."""
    found = [getattr(side, figure) or 0.0 for side in sides]  # None where all have the same tau
    chance = 2 / math.sqrt(ranked - 1)
    held = SHOWS if min(found) > chance else REVERSED if max(found) < -chance else NO
    return Finding(f"Spearman {_range(found)}, chance gives up to ±{chance:.2f}", held)


def _sides(runs: Comparison, figure: str) -> tuple[list[float], list[float]]:
    """A figure of iSogCLR's temperatures, of every seed and side: on pairs, and on images."""
    pairs, images = (
        [
            getattr(side, figure)
            for result in runs.seeds(METHOD[mode, "isogclr"])
            for side in result.temperatures.values()
        ]
        for mode in ("bimodal", "unimodal")
    )
    return pairs, images


def _long_tail_on_pairs(runs: Comparison) -> Finding:
    pairs, images = _sides(runs, "skewness")
    if not pairs or not images:
        return NOT_RUN
    tails = min(pairs) > LONG_TAIL and max(map(abs, images)) <= LONG_TAIL
    return Finding(f"skewness {_range(pairs)} on pairs, {_range(images)} on images", SHOWS if tails else NO)


def _colder_on_pairs(runs: Comparison) -> Finding:
    pairs, images = _sides(runs, "mean")
    if not pairs or not images:
        return NOT_RUN
    held = SHOWS if max(pairs) < min(images) else REVERSED if min(pairs) > max(images) else NO
    return Finding(f"means {_range(pairs)} on pairs, {_range(images)} on images", held)


def _hot_is_aligned(runs: Comparison) -> Finding:
    found = [side.alignment or 0.0 for result in runs.seeds(METHOD["bimodal", "isogclr"])
             for side in result.temperatures.values()]  # fmt: skip
    if not found:
        return NOT_RUN
    held = SHOWS if min(found) > 0 else REVERSED if max(found) < 0 else NO
    return Finding(f"Spearman of tau and a pair's similarity {_range(found)}", held)


def _more_at_small_batches(runs: Comparison) -> Finding:
    pairs = [[runs.swept(name, batch) for name in ("decl", "simclr")] for batch in (SMALL, LARGE)]
    more, gaps = runs.gain(*pairs), [runs.gap(better, worse) for better, worse in pairs]
    if more is None or gaps[0] is None or gaps[1] is None:
        return NOT_RUN
    if not all(runs.is_clear(pair[1]) for pair in pairs):
        return UNCLEAR
    return Finding(f"{signed(more)}: {signed(gaps[0])} at {SMALL}, {signed(gaps[1])} at {LARGE}", verdict(more))


def _hardly_depends_on_batch(runs: Comparison) -> Finding:
    """It shows where AUC-CL's change is none that matters, or SimCLR's is further from 0 beyond the error."""
    own, other = ([runs.swept(name, LARGE), runs.swept(name, SMALL)] for name in ("auc_cl", "simclr"))
    change, simclr = runs.gap(own[0], own[1]), runs.gap(other[0], other[1])
    if change is None or simclr is None:
        return NOT_RUN
    if not runs.is_clear(own[1]):
        return UNCLEAR
    less = runs.gain(own, other) if change.points < simclr.points else runs.gain(other, own)
    differs = less is not None and verdict(less) in (SHOWS, REVERSED)
    smaller = abs(change.points) < abs(simclr.points)
    held = SHOWS if verdict(change) == EQUIVALENT or (differs and smaller) else REVERSED if differs else UNDECIDED
    return Finding(f"{signed(change)} from {SMALL} to {LARGE}; SimCLR {signed(simclr)}", held)


def _changed(runs: Comparison, name: str, settings: Settings) -> list[Result]:
    return runs.seeds(METHOD["unimodal", name], changed=settings, seeds=FEW_SEEDS)


def _apart(runs: Comparison, of_value: list[list[Result]]) -> tuple[list[Result], list[Result]] | None:
    """The runs of the best and of the worst value of a setting; None before all are made."""
    means = [runs.mean(found) for found in of_value]
    if None in means:
        return None
    ranked = sorted(zip(of_value, means, strict=True), key=lambda one: one[1].points if one[1] else 0.0)
    return ranked[-1][0], ranked[0][0]


def _less_sensitive(runs: Comparison) -> Finding:
    """iSogCLR's best and worst tau_init are less apart than SimCLR's best and worst tau."""
    own, other = (_apart(runs, [_changed(runs, name, {key: value}) for value in TAUS])
                  for name, key in (("isogclr", "objective.tau_init"), ("simclr", "objective.tau")))  # fmt: skip
    if own is None or other is None or (less := runs.gain(other, own)) is None:
        return NOT_RUN
    gaps = [runs.gap(best, worst) for best, worst in (own, other)]
    words = " and ".join(signed(gap) for gap in gaps if gap)
    return Finding(f"best and worst are apart by {words}", verdict(less))


def _insensitive(name: str, key: str, values: Sequence[float]) -> Check:
    return lambda runs: level(runs, [_changed(runs, name, {f"objective.{key}": value}) for value in values])


def level(runs: Comparison, of_value: list[list[Result]]) -> Finding:
    """The best and the worst value of a setting are within what matters."""
    apart = _apart(runs, of_value)
    if apart is None or (gap := runs.gap(apart[0], apart[1])) is None:
        return NOT_RUN
    held = SHOWS if gap.points + gap.noise <= LEVEL else REVERSED if gap.points - gap.noise > LEVEL else UNDECIDED
    return Finding(f"best and worst are apart by {signed(gap)}", held)


def _collapses_without_alpha(runs: Comparison) -> Finding:
    """Collapse is a score that is not above an untrained encoder's, where that with alpha is."""
    usual, untrained = runs.seeds(METHOD["unimodal", "auc_cl"]), runs.baseline("unimodal", "untrained", "long-tailed")
    gap = runs.gap(_changed(runs, "auc_cl", {"objective.alpha": 0.0}), [untrained] if untrained else [])
    if gap is None or not usual:
        return NOT_RUN
    if not runs.is_clear(usual):
        return UNCLEAR
    return Finding(f"{signed(gap)} against an untrained encoder", NO if verdict(gap) == SHOWS else SHOWS)


def _unnormalised(runs: Comparison) -> Finding:
    return compared_runs(runs, _changed(runs, "decl", UNNORMALISED), _changed(runs, "simclr", UNNORMALISED))


def _loses_less_to_noise(runs: Comparison) -> Finding:
    """DeCL's loss of accuracy to noise is less than SimCLR's."""
    pairs = [[_changed(runs, name, {}), _changed(runs, name, NOISY[name])] for name in ("simclr", "decl")]
    less, losses = runs.gain(*pairs), [runs.gap(clean, noisy) for clean, noisy in pairs]
    if less is None or losses[0] is None or losses[1] is None:
        return NOT_RUN
    return Finding(f"SimCLR loses {signed(losses[0])}, DeCL {signed(losses[1])}", verdict(less))


def _plain_grows(runs: Comparison) -> Finding:
    """The mean temperature is above its first value at the end of every run."""
    if not (made := runs.all(map(plain, PLAIN_SETTINGS))):
        return NOT_RUN
    grown = [side.mean / result.run.settings["objective.tau_init"] for result in made
             for side in result.temperatures.values()]  # fmt: skip
    scores = [100 * (result.share(RETRIEVAL) or 0) for result in made]
    held = SHOWS if min(grown) > 1 else REVERSED if max(grown) < 1 else NO
    return Finding(f"the last mean is {min(grown):.1f} to {max(grown):.1f} times the first; R@1 {min(scores):.1f} to "
                   f"{max(scores):.1f}", held)  # fmt: skip


def signed(estimate: Estimate) -> str:
    return f"{points(estimate.points)} ± {estimate.noise:.1f}"


def points(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:+.2f}".replace("-", "−") for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


_CHECKS: dict[str, Callable[..., Check]] = {
    "above": _above,
    "above_at": _above_at,
    "more_on_a_long_tail": lambda: _more_on_a_long_tail,
    "rare_is_cold": _rare_is_cold,
    "long_tail_on_pairs": lambda: _long_tail_on_pairs,
    "colder_on_pairs": lambda: _colder_on_pairs,
    "hot_is_aligned": lambda: _hot_is_aligned,
    "more_at_small_batches": lambda: _more_at_small_batches,
    "hardly_depends_on_batch": lambda: _hardly_depends_on_batch,
    "less_sensitive": lambda: _less_sensitive,
    "insensitive_to_rho": lambda: _insensitive("isogclr", "rho", RHOS),
    "insensitive_to_alpha": lambda: _insensitive("auc_cl", "alpha", [alpha for alpha in ALPHAS if alpha]),
    "collapses_without_alpha": lambda: _collapses_without_alpha,
    "unnormalised": lambda: _unnormalised,
    "loses_less_to_noise": lambda: _loses_less_to_noise,
    "plain_grows": lambda: _plain_grows,
}


def groups_of(file: str, checks: Mapping[str, Callable[..., Check]]) -> list[Group]:
    """Read the claims of a file that stands beside this one."""

    def claim(entry: dict[str, Any]) -> Claim:
        name, *arguments = entry.get("check", [""])
        check = checks[name](*arguments) if name else entry["untested"]
        return Claim(entry["claim"], entry["source"], entry["reported"], check)

    groups = tomllib.loads(Path(__file__).with_name(file).read_text("utf-8"))["group"]
    return [Group(group["name"], group.get("picture", ""), [*map(claim, group["claim"])]) for group in groups]


GROUPS = groups_of("claims.toml", _CHECKS)
