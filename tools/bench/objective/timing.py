"""How long a step of each contender takes, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from ..progress import counted
from .contenders import OURS, Case, create_contender

_LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Timed:
    """Steps of one case."""

    ms: dict[str, float]
    """Median by contender."""
    times_ours: dict[str, float]
    """Median over the rounds of a contender's time by ours of the same round: what the machine does meanwhile to one,
    it does to both."""
    rounds: int
    threads: int
    """Of torch, on the CPU."""


def time_case(case: Case, contenders: Sequence[str], seconds: float) -> Timed:
    """Take a step of each in turn for `seconds` at most but five rounds at least, after two rounds to warm up."""
    steps = {contender: create_contender(contender, case) for contender in contenders}
    sum(_seconds(step, case) for step in steps.values())
    round_seconds = sum(_seconds(step, case) for step in steps.values())
    rounds = max(_LEAST_ROUNDS, int(seconds / round_seconds))
    took: dict[str, list[float]] = {contender: [] for contender in contenders}
    deadline = time.monotonic() + seconds
    for done in counted(f"time, batch {case.batch:,}", rounds):
        if done >= _LEAST_ROUNDS and time.monotonic() > deadline:
            break  # the machine became slower since the warm-up
        for contender, step in steps.items():
            took[contender].append(_seconds(step, case))
    ms = {contender: median(times) * 1e3 for contender, times in took.items()}
    return Timed(ms, times_ours(took), len(took[OURS]), torch.get_num_threads())


def times_ours(took: dict[str, list[float]]) -> dict[str, float]:
    """Median over the rounds of each contender's time by ours; `took` holds one time a round of each."""
    return {
        contender: median(other / ours for other, ours in zip(times, took[OURS], strict=True))
        for contender, times in took.items()
    }


def _seconds(step: Callable[[], None], case: Case) -> float:
    began = time.perf_counter()
    step()
    if case.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
