"""Measure what this machine can feed: images per second of both loaders and of the decoder alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch

from ..progress import progress_bar
from .work import WARM_UP, Contender, Serve, Work


@contextmanager
def ffcv(work: Work, **options: Any) -> Iterator[Serve]:
    """Serve with the `ffcv` loader, on all cores. options: further ones of the loader."""
    from ...pipeline.loading.ffcv_loader import FFCVLoader

    with FFCVLoader(work.dataset, work.order, **work.views_asked, **options) as loader:
        yield lambda number: loader.epoch(number, work.first_step)


@contextmanager
def dali(work: Work, **options: Any) -> Iterator[Serve]:
    """Serve with the `dali` loader. options: further ones of the loader."""
    from ...pipeline.loading.dali_loader import DALILoader  # it takes a second to import

    with DALILoader(work.dataset, work.order, **work.views_asked, **options) as loader:
        yield lambda number: loader.epoch(number, work.first_step)


def decode_only(work: Work) -> AbstractContextManager[Serve]:
    """Decode JPEGs of the first shard whole, once each, on all cores: no loader can be faster on a CPU."""
    from .decoding import decode_alone

    return decode_alone(work)


LOADERS: dict[str, Contender] = {"ffcv": ffcv, "dali": dali, "decode": decode_only}
NEEDS = {"ffcv": "...pipeline.dataset.jpeg", "dali": "nvidia.dali", "decode": "...pipeline.dataset.jpeg"}
"""The module that each needs. Not ffcv itself, whose import sets torch and numba to one thread."""


def missing(module: str) -> str:
    """Return why a module cannot be imported, or ""."""
    try:
        import_module(module, __package__)
    except (ImportError, OSError) as error:  # OSError: a library that it is linked to
        return str(error)
    return ""


def rates(contenders: Mapping[str, Contender], work: Work, rounds: int) -> dict[str, list[float]]:
    """Return each one's images per second, round by round; they take turns, after a round of warm-up."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    with ExitStack() as opened, progress_bar("rounds", 1 + rounds) as bar:
        opened.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # as importing FFCV does; the others decode in threads of their own
        serves = {name: opened.enter_context(contender(work)) for name, contender in contenders.items()}
        for number in range(1 + rounds):
            for name, serve in serves.items():
                found[name].append(_images_per_second(serve(number), work))
            bar.update(number + 1)
    return {name: of_rounds[1:] for name, of_rounds in found.items()}


def _images_per_second(batches: Iterator[object], work: Work) -> float:
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(WARM_UP):
        next(batches)
    began = now()
    served = sum(1 for _ in batches)
    return served * work.order.batch_size / (now() - began)
