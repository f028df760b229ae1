"""What the papers claim, and what the runs have to say about it. Verdicts are computed, never written."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from thermopile.pipeline.sources.glyphs import class_sizes

from reproduction.comparison import Comparison, Estimate
from reproduction.plan import METHOD, SEEDS, Mode
from reproduction.results import ZERO_SHOT, Measure, Result
from reproduction.schedule import BATCHES, CONSTANT_GAMMA, OPTIMIZERS, OTHER_TAU_INIT, WITH_COSINE

SHOWS = "shows"
NOISE = "does not show: within noise"
REVERSED = "does not show: the reverse does"
NO = "does not show"
NOT_CLEAR = "no verdict"
NOT_TESTED = "not tested"

SMALL, LARGE = min(BATCHES), max(BATCHES)
LONG_TAIL = 0.5
"""Skewness from which a distribution counts as skewed."""
REMEMBERED = 0.1
"""Share of the difference of two tau_init from which the last temperatures still tell them apart."""


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
    if abs(estimate.points) <= estimate.noise:
        return NOISE
    return SHOWS if estimate.points > 0 else REVERSED


def verdict_of_all(estimates: Sequence[Estimate]) -> str:
    """Return the verdict on the claim that several figures are all above 0."""
    verdicts = {verdict(estimate) for estimate in estimates}
    return next(worst for worst in (REVERSED, NOISE, SHOWS) if worst in verdicts)


def _compared(runs: Comparison, better: list[Result], worse: list[Result], measure: Measure | None = None) -> Finding:
    """The claim that a method is above a baseline."""
    if (gap := runs.gap(better, worse, measure)) is None:
        return NOT_RUN
    if not runs.is_clear(worse, measure):
        return UNCLEAR
    tail = runs.gap(better, worse, measure, "tail")
    return Finding(signed(gap) + (f"; in the tail {signed(tail)}" if tail else ""), verdict(gap))


def _above(mode: Mode, better: str, worse: str, score: str = "") -> Check:
    measure = {"zero_shot": ZERO_SHOT, "": None}[score]
    return lambda runs: _compared(runs, runs.best(mode, better), runs.best(mode, worse), measure)


def _above_at(better: str, worse: str, batch: int) -> Check:
    return lambda runs: _compared(runs, runs.swept(better, batch), runs.swept(worse, batch))


def _more_on_a_long_tail(runs: Comparison) -> Finding:
    gains = []
    for data in ("long-tailed", "balanced"):
        simclr = runs.best("unimodal", "simclr", data=data)
        if (gain := runs.gap(runs.best("unimodal", "isogclr", data=data), simclr)) is None:
            return NOT_RUN
        if not runs.is_clear(simclr, data=data):
            return UNCLEAR
        gains.append(gain)
    return Finding(f"{signed(gains[0])}; balanced {signed(gains[1])}", verdict(gains[0].minus(gains[1])))


def _rare_is_cold(mode: Mode, label: str) -> Check:
    """The claim that tau grows with class size, in every seed and side: Spearman's correlation beside chance's."""

    def check(runs: Comparison) -> Finding:
        found, beside = _spearman(runs.seeds(mode, label)), _spearman(runs.best(mode, "isogclr"))
        if not found:
            return NOT_RUN
        chance = 2 / math.sqrt(len(class_sizes()) - 1)
        held = SHOWS if min(found) > chance else REVERSED if max(found) < -chance else NOISE
        words = f"; with the settings of the best score {_range(beside)}" if label != "isogclr" and beside else ""
        return Finding(f"Spearman {_range(found)}, chance gives up to ±{chance:.2f}{words}", held)

    return check


def _spearman(runs: Sequence[Result]) -> list[float]:
    """Return the correlation of each seed and side; 0 where all classes have the same tau."""
    return [side.spearman or 0.0 for result in runs for side in result.temperatures.values()]


def _long_tail_on_pairs(runs: Comparison) -> Finding:
    pairs, images = ([side.skewness for result in runs.best(mode, "isogclr") for side in result.temperatures.values()]
                     for mode in ("bimodal", "unimodal"))  # fmt: skip
    if not pairs or not images:
        return NOT_RUN
    tails = min(pairs) > LONG_TAIL and max(map(abs, images)) <= LONG_TAIL
    return Finding(f"skewness {_range(pairs)} on pairs, {_range(images)} on images", SHOWS if tails else NO)


def _forgets_tau_init(runs: Comparison) -> Finding:
    """The share of the difference of two first temperatures that is left between the last ones' means."""
    left = []
    for mode, other in OTHER_TAU_INIT.items():
        first = METHOD[mode, "isogclr"].fixed["objective.tau_init"]
        pair = [
            runs.seeds(mode, "isogclr", changed={"objective.tau_init": tau}, seeds=SEEDS[:1]) for tau in (first, other)
        ]
        if not all(pair):
            return NOT_RUN
        (one,), (two,) = pair
        left += [abs(one.temperatures[side].mean - two.temperatures[side].mean) / abs(first - other)
                 for side in one.temperatures]  # fmt: skip
    words = ", ".join(f"{100 * share:.0f} %" for share in left)
    return Finding(f"left of the difference of two tau_init: {words}", SHOWS if max(left) < REMEMBERED else NO)


def _more_at_small_batches(runs: Comparison) -> Finding:
    simclr = [runs.swept("simclr", batch) for batch in (SMALL, LARGE)]
    small, large = (runs.gap(runs.swept("decl", batch), of) for batch, of in zip((SMALL, LARGE), simclr, strict=True))
    if small is None or large is None:
        return NOT_RUN
    if not all(map(runs.is_clear, simclr)):
        return UNCLEAR
    return Finding(f"gain {signed(small)} at {SMALL}, {signed(large)} at {LARGE}", verdict(small.minus(large)))


def _hardly_depends_on_batch(runs: Comparison) -> Finding:
    """It shows where AUC-CL's change is within its error and SimCLR's is not: else the error may be too large."""
    changes = [runs.gap(runs.swept(name, LARGE), runs.swept(name, SMALL)) for name in ("auc_cl", "simclr")]
    change, simclr = changes
    if change is None or simclr is None:
        return NOT_RUN
    if not runs.is_clear(runs.swept("auc_cl", SMALL)):
        return UNCLEAR
    held = NO if verdict(change) != NOISE else NOISE if verdict(simclr) == NOISE else SHOWS
    return Finding(f"{signed(change)} from {SMALL} to {LARGE}; SimCLR {signed(simclr)}", held)


def _collapses_without_alpha(runs: Comparison) -> Finding:
    """Collapse is a score that is not above an untrained encoder's, where that with alpha is."""
    usual, untrained = runs.seeds("unimodal", "auc_cl"), runs.baseline("unimodal", "untrained")
    without = runs.seeds("unimodal", "auc_cl", changed={"objective.alpha": 0.0}, seeds=SEEDS[:1])
    gap = runs.gap(without, [untrained] if untrained else [])
    if gap is None or not usual:
        return NOT_RUN
    if not runs.is_clear(usual):
        return UNCLEAR
    return Finding(f"{signed(gap)} against an untrained encoder", NO if verdict(gap) == SHOWS else SHOWS)


def _best_version(runs: Comparison) -> Finding:
    best = runs.seeds("bimodal", "fastclip_v3")
    rivals = {f"v{version}": runs.seeds("bimodal", f"fastclip_v{version}") for version in range(3)}
    gaps = {name: gap for name, rival in rivals.items() if (gap := runs.gap(best, rival))}
    if len(gaps) < len(rivals):
        return NOT_RUN
    if not all(map(runs.is_clear, rivals.values())):
        return UNCLEAR
    words = ", ".join(f"{signed(gap)} to {name}" for name, gap in gaps.items())
    return Finding(words, verdict_of_all([*gaps.values()]))


def _cosine_of_gamma(runs: Comparison) -> Finding:
    """The mean of the versions' gains."""
    constant = {label: runs.seeds("bimodal", label, changed=CONSTANT_GAMMA) for label in WITH_COSINE}
    gaps = {label: gap for label, rival in constant.items() if (gap := runs.gap(runs.seeds("bimodal", label), rival))}
    if len(gaps) < len(constant):
        return NOT_RUN
    if not all(map(runs.is_clear, constant.values())):
        return UNCLEAR
    noise = math.hypot(*(gap.noise for gap in gaps.values())) / len(gaps)
    mean = Estimate(fmean(gap.points for gap in gaps.values()), noise)
    each = ", ".join(f"{label[-2:]} {points(gap.points)}" for label, gap in gaps.items())
    return Finding(f"{signed(mean)} ({each})", verdict(mean))


def _order_of_optimizers(runs: Comparison) -> Finding:
    each = [runs.optimized(name) for name in OPTIMIZERS]
    gaps = [gap for better, worse in pairwise(each) if (gap := runs.gap(better, worse))]
    if len(gaps) < len(each) - 1:
        return NOT_RUN
    if not runs.is_clear(each[0]):
        return UNCLEAR
    return Finding(", ".join(map(signed, gaps)), verdict_of_all(gaps))


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
    "forgets_tau_init": lambda: _forgets_tau_init,
    "more_at_small_batches": lambda: _more_at_small_batches,
    "hardly_depends_on_batch": lambda: _hardly_depends_on_batch,
    "collapses_without_alpha": lambda: _collapses_without_alpha,
    "best_version": lambda: _best_version,
    "cosine_of_gamma": lambda: _cosine_of_gamma,
    "order_of_optimizers": lambda: _order_of_optimizers,
}


def _claim(entry: dict[str, Any]) -> Claim:
    name, *arguments = entry.get("check", [""])
    check = _CHECKS[name](*arguments) if name else entry["untested"]
    return Claim(entry["claim"], entry["source"], entry["reported"], check)


GROUPS = [
    Group(group["name"], group["picture"], [_claim(entry) for entry in group["claim"]])
    for group in tomllib.loads(Path(__file__).with_name("claims.toml").read_text("utf-8"))["group"]
]
