"""Images a second of each loader, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import torch

from ....pipeline.cores import cores
from ..figure import Figure
from ..measured import Measured
from ..progress import say
from ..rounds import ratios, take_turns
from .cases import CASES, NAMES, Case
from .contenders import CONTENDERS, Serve, configured
from .material import prepare
from .sizes import RateSizes


def measure(sizes: RateSizes, directory: Path) -> Measured:
    """Open every contender of the case, and let each serve its batches once a round."""
    case = CASES[sizes.case]
    say(f"{sizes.case}: making {sizes.images:,} photographs")
    material = prepare(directory, sizes.images, sizes.batch)
    torch.set_num_threads(1)  # FFCV sets as much where it is imported; the others decode in threads of their own
    with ExitStack() as opened:
        measures: dict[str, Callable[[int], float]] = {}
        for name in case.contenders:
            serve = opened.enter_context(CONTENDERS[name](material, case, sizes))
            measures[name] = partial(images_per_second, serve, sizes)
        rates = take_turns(sizes.case, measures, sizes.rounds)
    return Measured(
        f"images a second of {case.title}; {sizes.images:,} photographs of 400×300 to "
        f"{sizes.image_size}×{sizes.image_size}, batches of {sizes.batch}, {cores()} cores; "
        f"medians of {sizes.rounds} rounds of {sizes.batches} batches each",
        "as named; ratios are the median of the rounds (lowest–highest)",
        tuple(_figures(case, rates)),
        notes=configured(case),
    )


def images_per_second(serve: Serve, sizes: RateSizes, number: int) -> float:
    """Of one round, once the first few batches have filled what the contender keeps ready."""
    batches = serve(number)
    for _ in range(sizes.warm_up):
        next(batches)
    _finish()
    began = time.perf_counter()
    served = sum(1 for _ in batches)
    _finish()
    return served * sizes.batch / (time.perf_counter() - began)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _figures(case: Case, rates: dict[str, list[float]]) -> list[Figure]:
    """Each of ours beside each of the others, and beside bare decoding."""
    return [
        Figure(
            f"{name}_over_{other}", f"{NAMES[name]}, beside {NAMES[other]}", "/s",
            median(rates[name]), median(rates[other]), more_is_better=True,
            ratio_at_least=case.asked.get((name, other)), ratios=ratios(rates[name], rates[other]),
        )
        for name, other in case.pairs
    ]  # fmt: skip
