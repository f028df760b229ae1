"""What the papers claim, and what a comparison has to say about it. Verdicts are computed, never written."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from reproduction.plan import Mode
from reproduction.results import LINEAR, RETRIEVAL, ZERO_SHOT, Estimate, Results, difference

SHOWS = "shows"
NOISE = "does not show: within noise"
REVERSED = "does not show: the reverse does"
NO = "does not show"
NOT_TESTED = "not tested"

NOT_RUN = "the runs that would say so were not made"
ONE_BATCH_SIZE = "one batch size was run; `make reproduce FULL=1` has two"
LONG_TAIL = 0.5
"""Skewness from which a distribution counts as skewed."""


class Finding(NamedTuple):
    """What was seen of a claim."""

    seen: str
    """Or, where it was not tested, why."""
    verdict: str


class Claim(NamedTuple):
    """A claim of a paper."""

    claim: str
    source: str
    reported: str
    """The paper's own figures, in points of 100, and on what."""
    check: Callable[[Results], Finding] | str
    """How the runs test it, or why they cannot."""

    def judge(self, results: Results) -> Finding:
        return Finding(self.check, NOT_TESTED) if isinstance(self.check, str) else self.check(results)


def verdict(estimate: Estimate) -> str:
    """Return the verdict on the claim that a figure is above 0."""
    if abs(estimate.points) <= estimate.noise:
        return NOISE
    return SHOWS if estimate.points > 0 else REVERSED


def _above(mode: Mode, better: str, worse: str, score: str) -> Callable[[Results], Finding]:
    """The claim that a method is above another on the whole test set, at the smallest batch size."""
    measure = {"linear": LINEAR, "retrieval": RETRIEVAL, "zero_shot": ZERO_SHOT}[score]

    def check(results: Results) -> Finding:
        batch_size = min(results.batch_sizes(mode), default=0)
        if (gap := results.gap(mode, better, worse, batch_size, measure)) is None:
            return Finding(NOT_RUN, NOT_TESTED)
        tail = fmean(results.shares(mode, better, batch_size, measure, "tail")) - fmean(
            results.shares(mode, worse, batch_size, measure, "tail")
        )
        seen = f"{measure.label}, batch {batch_size}: {signed(gap)}; in the tail {_points(100 * tail)}"
        return Finding(seen, verdict(gap))

    return check


def _most_at_small_batches(results: Results) -> Finding:
    if (gaps := _at_two_batch_sizes(results, lambda b: results.gap("unimodal", "decl", "simclr", b, LINEAR))) is None:
        return Finding(ONE_BATCH_SIZE, NOT_TESTED)
    small, large = gaps
    return Finding(f"gain {signed(small)} with the smallest batches, {signed(large)} with the largest",
                   verdict(difference(small, large)))  # fmt: skip


def _hardly_depends_on_batch(results: Results) -> Finding:
    if (means := _at_two_batch_sizes(results, lambda b: results.mean("unimodal", "auc_cl", b, LINEAR))) is None:
        return Finding(ONE_BATCH_SIZE, NOT_TESTED)
    small, large = means
    change = difference(large, small)
    held = verdict(change) == NOISE
    return Finding(f"{signed(change)} from the smallest batches to the largest", SHOWS if held else NO)


def _at_two_batch_sizes(results: Results, figure: Callable[[int], Estimate | None]) -> tuple[Estimate, Estimate] | None:
    """The figure with the smallest and the largest batches; None where there is one batch size."""
    batch_sizes = results.batch_sizes("unimodal")
    if len(batch_sizes) < 2 or (small := figure(batch_sizes[0])) is None or (large := figure(batch_sizes[-1])) is None:
        return None
    return small, large


def _rare_is_cold(mode: Mode) -> Callable[[Results], Finding]:
    """The claim that tau grows with class size, in every run and side: Spearman's correlation beside chance's."""

    def check(results: Results) -> Finding:
        runs = [result for result in results.every if result.run.method.mode == mode]
        found = [side.spearman for result in runs for side in result.temperatures.values() if side.spearman is not None]
        if not found:
            return Finding(NOT_RUN, NOT_TESTED)
        chance = 2 / math.sqrt(sum(runs[0].classes_of_band.values()) - 1)
        held = SHOWS if min(found) > chance else REVERSED if max(found) < -chance else NOISE
        return Finding(f"Spearman {min(found):+.2f} to {max(found):+.2f}; chance gives up to ±{chance:.2f}", held)

    return check


def _long_tail_on_pairs(results: Results) -> Finding:
    """Skewness of iSogCLR's temperatures: that of pairs above that of images, which is to be that of a normal one."""
    skewness = {
        mode: [side.skewness for batch in results.batch_sizes(mode) for result in results.of(mode, "isogclr", batch)
               for side in result.temperatures.values()]
        for mode in ("bimodal", "unimodal")
    }  # fmt: skip
    pairs, images = skewness["bimodal"], skewness["unimodal"]
    if not pairs or not images:
        return Finding(NOT_RUN, NOT_TESTED)
    seen = (
        f"skewness {min(pairs):+.2f} to {max(pairs):+.2f} on pairs, {min(images):+.2f} to {max(images):+.2f} on images"
    )
    tails = min(pairs) > LONG_TAIL and max(map(abs, images)) <= LONG_TAIL
    return Finding(seen, SHOWS if tails else NO)


def signed(estimate: Estimate) -> str:
    return f"{_points(estimate.points)} ± {estimate.noise:.1f}"


def _points(points: float) -> str:
    return f"{points:+.1f}".replace("-", "−")


_CHECKS: dict[str, Callable[..., Callable[[Results], Finding]]] = {
    "above": _above,
    "rare_is_cold": _rare_is_cold,
    "most_at_small_batches": lambda: _most_at_small_batches,
    "hardly_depends_on_batch": lambda: _hardly_depends_on_batch,
    "long_tail_on_pairs": lambda: _long_tail_on_pairs,
}


def _claim(entry: dict[str, Any]) -> Claim:
    name, *arguments = entry.get("check", [""])
    check = _CHECKS[name](*arguments) if name else entry["untested"]
    return Claim(entry["claim"], entry["source"], entry["reported"], check)


CLAIMS = [_claim(entry) for entry in tomllib.loads(Path(__file__).with_name("claims.toml").read_text("utf-8"))["claim"]]
