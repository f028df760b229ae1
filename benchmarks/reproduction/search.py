"""The search: the same for every method, on the development set, at the length of the compared runs.

All of a grid; then, until there are TRIALS runs, the neighbours of the best: first beyond an edge of what was tried,
then those that were left out, then halfway. At another batch size, with a linear head, and of a method that is only
beside the others, it begins from what was chosen at BATCH with the usual head, or by that method.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .plan import (
    BATCH,
    METHOD,
    TRIALS,
    TRIALS_AGAIN,
    TRIALS_OF_RIVAL,
    TRIALS_UNDER_NOISE,
    Method,
    Run,
    Settings,
    train_run,
)
from .results import DECIDES, Results


class Search(NamedTuple):
    """A method's search at a batch size, as far as it has come."""

    method: Method
    batch: int
    size: int
    """Runs that it has at the end."""
    tried: list[Settings]
    """What is tried; at most one that has no score yet is not of the grid."""
    scores: list[float | None]

    @property
    def runs(self) -> list[Run | None]:
        """Its runs; None for those that are not known yet."""
        known = [trial(self.method, settings, self.batch) for settings in self.tried]
        return [*known, *[None] * (self.size - len(known))]

    @property
    def is_done(self) -> bool:
        return len(self.tried) == self.size and None not in self.scores

    @property
    def best(self) -> Settings:
        """The settings with the best score so far, of equals the first; a training that failed has 0."""
        return max(zip(self.tried, self.scores, strict=True), key=lambda one: -1.0 if one[1] is None else one[1])[0]

    @property
    def at_edge(self) -> list[str]:
        """Settings whose best value is the least or the largest that was tried, and might have been exceeded."""
        best, found = self.best, []
        for key, axis in self.method.axes.items():
            tried = {settings[key] for settings in self.tried}
            if axis.factor and any(
                best[key] == end and axis.beside(end, power) is not None
                for end, power in ((min(tried), -1), (max(tried), 1))
            ):
                found.append(key)
        return found

    def next(self) -> Settings | None:
        """The neighbour of the best that is tried next."""
        best = self.best
        edges = set(self.at_edge)
        beyond = [key for key in self.method.axes if key in edges]
        around = [*_beside(self.method, best, beyond, 1), *_beside(self.method, best, self.method.axes, 1),
                  *_beside(self.method, best, self.method.axes, 0.5)]  # fmt: skip
        return next((settings for settings in around if settings not in self.tried), None)


def _beside(method: Method, best: Settings, keys: Iterable[str], power: float) -> Iterable[Settings]:
    for key in keys:
        for signed in (power, -power):
            if (value := method.axes[key].beside(best[key], signed)) is not None:
                yield best | {key: value}


def search(method: Method, results: Results, batch: int = BATCH) -> Search | None:
    """Return a method's search; None while what it begins from is not chosen."""
    key = method.mode, method.label, batch
    if key not in results.searches:
        results.searches[key] = _search(method, results, batch)
    found: Search | None = results.searches[key]
    return found


def _search(method: Method, results: Results, batch: int) -> Search | None:
    size = trials_of(method, batch)
    if size != TRIALS_AGAIN or method.trials:
        tried = method.grid()
    elif (start := chosen(METHOD[method.mode, method.start or method.name], results)) is not None:
        tried = [{key: start.get(key, axis.values[0]) for key, axis in method.axes.items()}]
    else:
        return None
    while True:
        found = Search(method, batch, size, tried, [score(method, settings, results, batch) for settings in tried])
        if len(tried) == size or None in found.scores or (more := found.next()) is None:
            return found
        tried = [*tried, more]


def trials_of(method: Method, batch: int = BATCH) -> int:
    """Runs that a method's search at a batch size has at the end."""
    if method.trials:
        return method.trials
    if method.wrong:
        return TRIALS_OF_RIVAL if method.start else TRIALS_UNDER_NOISE
    from_grid = batch == BATCH and method == METHOD[method.mode, method.name] and not method.start
    return TRIALS if from_grid else TRIALS_AGAIN


def chosen(method: Method, results: Results, batch: int = BATCH) -> Settings | None:
    """The settings with the best score of the search; None while runs of it are missing."""
    found = search(method, results, batch)
    return found.best if found is not None and found.is_done else None


def score(method: Method, settings: Settings, results: Results, batch: int) -> float | None:
    result = results.of(trial(method, settings, batch))
    return None if result is None else result.share(DECIDES[method.mode]) or 0.0


def trial(method: Method, settings: Settings, batch: int) -> Run:
    return train_run(method, settings, method.data[0], batch=batch)
