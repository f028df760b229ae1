"""What the runs on real data say about the claims of real.toml, and about which of them there are further seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scipy.stats import spearmanr

from . import claims
from .claims import NOT_RUN, Finding
from .comparison import ALL, Comparison
from .plan import Mode
from .real import FURTHER_SEEDS, METHODS, PLAN, SEEDS, VARIANTS, compared, parts, whole
from .results import KNN, LOOKED_AT, RETRIEVAL, Result, Results, Temperatures
from .schedule import Part, Runs
from .search import search

MOST_FURTHER = 16
"""Variants that have further seeds, at most: those of the first claims that three seeds leave undecided."""
Check = Callable[[Any], Finding]
"""Of what a Real has."""
RANKED = 0.74
"""Spearman's correlation of eight trials that chance exceeds once in forty times."""
_FURTHER: tuple[Mode, str, int] = ("bimodal", "further seeds", 0)
"""Where the names of these variants are kept until a result is added."""


class Real(Comparison):
    """The finished runs."""

    further: tuple[int, ...] = FURTHER_SEEDS

    def of(self, name: str) -> list[Result]:
        """A variant's runs, one for each seed, and for each further one once all of these are made."""
        found = self.all(compared(name, self.results, seed) for seed in VARIANTS[name].seeds)
        return [*found, *self.all(compared(name, self.results, seed) for seed in self.further)] if found else []

    def temperatures(self, name: str) -> list[Temperatures]:
        return [side for result in self.of(name) for side in result.temperatures.values()]


def _above(better: str, worse: str, band: str = ALL, measure: str = "") -> Check:
    return lambda runs: claims.compared_runs(runs, runs.of(better), runs.of(worse), KNN if measure else None, band)


def _cold(name: str, figure: str) -> Check:
    def check(runs: Any) -> Finding:
        sides = runs.temperatures(name)
        every = {"spearman": len(sides[0].sizes), "words": sum(sides[0].sizes), "copies": LOOKED_AT} if sides else {}
        return claims.goes_with(sides, figure, every[figure]) if sides else NOT_RUN

    return check


def _same_ranking(name: str) -> Check:
    def check(runs: Any) -> Finding:
        found, longer = search(METHODS[name], runs.results), runs.all(whole(name, runs.results))
        if found is None or not found.is_done or not longer:
            return NOT_RUN
        scores = [result.share(RETRIEVAL) or 0.0 for result in longer]
        kept = float(spearmanr([score or 0.0 for score in found.scores], scores).statistic)
        lost = max(scores) - scores[found.tried.index(found.best)]
        held = claims.SHOWS if kept > RANKED else claims.UNDECIDED if kept > -RANKED else claims.REVERSED
        return Finding(f"Spearman {kept:+.2f}; its choice is {100 * lost:.1f} points below the whole length's", held)

    return check


CHECKS: dict[str, Callable[..., Check]] = {
    "above": _above,
    "cold": _cold,
    "level": lambda *names: lambda runs: claims.level(runs, [runs.of(name) for name in names]),
    "same_ranking": _same_ranking,
}
GROUPS = claims.groups_of("real.toml", CHECKS)


def every_part() -> list[Part]:
    """Everything that is compared: all icons last, before them further seeds where three decide nothing."""
    *first, last = parts()
    return [*first, Part(f"further seeds of what is undecided, {MOST_FURTHER} variants at most", 90, _further), last]


def _further(results: Results) -> Runs:
    """The further seeds of each variant that is compared in a claim that the others leave undecided, or are to test."""
    if _FURTHER not in results.searches:
        runs, names = Real(results), dict[str, None]()
        runs.further = ()
        checks = [each.get("check", [""]) for group in PLAN["group"] for each in group["claim"]]
        for better, worse, *of in (words for check, *words in checks if check == "above"):
            is_open = _above(better, worse, *of)(runs).verdict in (claims.UNDECIDED, claims.NOT_TESTED)
            if is_open and VARIANTS[better].seeds == SEEDS:
                names |= {better: None, worse: None}
        results.searches[_FURTHER] = [*names][:MOST_FURTHER]
    for name in results.searches[_FURTHER]:
        yield from (compared(name, results, seed) for seed in FURTHER_SEEDS)
