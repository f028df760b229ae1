"""The search: the same for every method, on the development set, at the length of the compared runs.

All of a grid, then twice and half the learning rate of the best, until the best is between two that were tried.
"""

from __future__ import annotations

from reproduction.plan import BATCH, RATE, Method, Run, Settings, train_run
from reproduction.results import DECIDES, Result, Results

FACTORS = (2, 0.5)


def trials(method: Method, results: Results, batch: int = BATCH) -> list[Run | None]:
    """The runs of a method's search that are known; None for those after the grid meanwhile."""
    tried = _tried(method, results, batch)
    known: list[Run | None] = [_trial(method, settings, batch) for settings in tried]
    more = not method.for_tau and len(tried) == len(method.candidates())
    return known + [None] * (len(FACTORS) if more else 0)


def chosen(method: Method, results: Results, batch: int = BATCH) -> Settings | None:
    """The settings with the best score of the search; None while runs of it are missing."""
    best = _best(method, _tried(method, results, batch), results, batch)
    return best and best[0]


def score_of_search(method: Method, results: Results) -> float | None:
    """The best score of the search, a share; None while runs of it are missing."""
    best = _best(method, _tried(method, results, BATCH), results, BATCH)
    return best and best[1]


def _tried(method: Method, results: Results, batch: int) -> list[Settings]:
    tried = method.candidates()
    while not method.for_tau and (best := _best(method, tried, results, batch)):
        around = [best[0] | {RATE: factor * best[0][RATE]} for factor in FACTORS]
        if not (new := [settings for settings in around if settings not in tried]):
            break
        tried += new
    return tried


def _best(method: Method, candidates: list[Settings], results: Results, batch: int) -> tuple[Settings, float] | None:
    """The best of the candidates, of equals the first, and what it is judged by; a training that failed has 0."""
    best = None
    for settings in candidates:
        if (result := results.of(_trial(method, settings, batch))) is None:
            return None
        if best is None or _score(method, result) > best[1]:
            best = settings, _score(method, result)
    return best


def _score(method: Method, result: Result) -> float:
    if method.for_tau:
        return min((side.spearman or 0.0 for side in result.temperatures.values()), default=0.0)
    return result.share(DECIDES[method.mode]) or 0.0


def _trial(method: Method, settings: Settings, batch: int) -> Run:
    return train_run(method, settings, "development", batch=batch)
