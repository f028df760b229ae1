"""Contenders that take turns, so that what the machine does meanwhile to one, it does to all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .progress import counted


def take_turns(title: str, measures: Mapping[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Call each measure(round) once a round, after a round (number 0) that only warms up; what they returned."""
    found: dict[str, list[float]] = {contender: [] for contender in measures}
    for number in counted(title, 1 + rounds):
        for contender, measure in measures.items():
            value = measure(number)
            if number > 0:
                found[contender].append(value)
    return found


def ratios(rates: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    """How many times faster the first was, round by round."""
    return tuple(rate / other for rate, other in zip(rates, others, strict=True))
