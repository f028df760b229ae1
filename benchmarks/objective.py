"""What a step of an objective costs: forward, backward and new state, in time and in memory.

Beside it stand three bare products of its size, the least that it can take, and, beside isogclr, its equations written
plainly and differentiated by torch (trainer/objectives/reference.py).

\b
time    turn by turn; each batch size for about a minute
memory  the peak above features and state, each contender in a process of its own

Examples:
  python -m benchmarks.objective --set name=simclr --set mode=unimodal --set device=cuda
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from thermopile.trainer.objectives import Progress, create_objective
from thermopile.trainer.objectives.pairs import set_until
from thermopile.trainer.objectives.reference import isogclr_step

from .harness import Figure, Measured, Part, counted, isolated, memory_in_use, peak_memory, proc_bytes, script, timed

OURS, PRODUCTS, AUTOGRAD = "ours", "products", "autograd"
WORDS = {PRODUCTS: "three bare products", AUTOGRAD: "plain autograd"}
MATRICES = {OURS: 0, PRODUCTS: 1, AUTOGRAD: 9}
"""Similarity matrices of float32 that a contender holds at its peak, about; ours does not grow with the batch."""


@dataclass(frozen=True)
class Sizes:
    """An objective with its default settings, and the batch sizes at which it takes steps."""

    batches: str
    name: str = "isogclr"
    mode: str = "bimodal"
    dim: int = 512
    device: str = "cpu"
    budget: int = 0
    """Bytes for similarities; 0: what suits the device."""
    precision: str = "float32"
    """The precision of products on a GPU."""
    compile: bool = False
    seconds: float = 60.0
    """For each batch size."""

    @property
    def contenders(self) -> tuple[str, ...]:
        """The rival is written for one objective."""
        return (OURS, PRODUCTS, AUTOGRAD) if self.name == "isogclr" else (OURS, PRODUCTS)


def time(sizes: Sizes, directory: Path) -> Measured:
    """Turns of all contenders that the memory has room for, at least five rounds after two that warm up."""
    figures = []
    for batch in _batches(sizes):
        steps = {name: contender(name, sizes, batch) for name in sizes.contenders if _fits(name, sizes, batch)}
        round_seconds = [sum(map(_seconds, steps.values())) for _ in range(2)][1]
        deadline = clock.monotonic() + sizes.seconds
        took: dict[str, list[float]] = {name: [] for name in steps}
        for done in counted(f"time, batch {batch:,}", max(5, int(sizes.seconds / round_seconds))):
            if done >= 5 and clock.monotonic() > deadline:
                break  # the machine became slower since the warm-up
            for name, step in steps.items():
                took[name].append(1e3 * _seconds(step))
        asked = {PRODUCTS: 1 / 1.35} if (batch, sizes.dim, sizes.device) == (2048, 512, "cpu") else {}
        figures += [
            Figure.of_rounds(f"{batch}_{name}_ms", f"{batch:,}: beside {WORDS[name]}", "ms", took[OURS], took[name],
                             ratio_at_least=asked.get(name))
            for name in steps if name != OURS
        ]  # fmt: skip
    return _measured("forward, backward and new state", sizes, figures)


def memory(sizes: Sizes, directory: Path) -> Measured:
    """A contender that the memory has no room for is left out."""
    figures = []
    for batch in _batches(sizes):
        peaks = {}
        for name in sizes.contenders:
            if _fits(name, sizes, batch):
                try:
                    peaks[name] = isolated(peak_bytes, name, sizes, batch) / 2**20
                except (BrokenProcessPool, RuntimeError):  # killed, or told by torch that there is no more
                    continue
        at_most = 1024 if (batch, sizes.dim, sizes.name) == (32_768, 512, "isogclr") else None
        figures += [
            Figure(f"{batch}_{name}_mib", f"{batch:,}: beside {WORDS[name]}", "MiB", peaks[OURS], peak, at_most=at_most)
            for name, peak in peaks.items() if name != OURS
        ] or [Figure(f"{batch}_mib", f"{batch:,}", "MiB", peaks[OURS], at_most=at_most)]  # fmt: skip
    return _measured("peak memory above features and state", sizes, figures)


def _measured(what: str, sizes: Sizes, figures: list[Figure]) -> Measured:
    of = f"{sizes.name}, {sizes.mode}, d = {sizes.dim}, {sizes.precision}{', compiled' if sizes.compile else ''}"
    return Measured(
        f"{what} of {of}, on {sizes.device}, {torch.get_num_threads()} threads",
        "as named; the ratio is how many times less ours takes, the median of the rounds", figures,
        notes=["What the free memory has no room for is left out."],
    )  # fmt: skip


def _batches(sizes: Sizes) -> list[int]:
    return [int(batch) for batch in sizes.batches.split("+")]


def _fits(name: str, sizes: Sizes, batch: int) -> bool:
    """Whether the memory that is free holds the similarity matrices of a contender, and torch beside them."""
    rows = batch if sizes.mode == "bimodal" else 2 * batch
    free = torch.cuda.mem_get_info()[0] if sizes.device == "cuda" else proc_bytes("meminfo", "MemAvailable")
    return MATRICES[name] * 4 * rows**2 + 10**9 < free


def contender(name: str, sizes: Sizes, batch: int) -> Callable[[], None]:
    """A call that does one step: forward, backward into the features, new state.

    Features are float32 [batch, dim], random and unit-norm; the samples have been seen before.
    """
    random = torch.Generator().manual_seed(0)
    first, second = (
        normalize(torch.randn(batch, sizes.dim, generator=random)).to(sizes.device).requires_grad_() for _ in range(2)
    )
    if name == PRODUCTS:
        return partial(_three_products, first, second, sizes)
    chosen: dict[str, Any] = {"precision": sizes.precision, "compile": sizes.compile}
    objective = create_objective(sizes.name, sizes.mode, similarity_budget=sizes.budget, **chosen)
    objective.to(sizes.device)
    state = _seen(objective.fields, batch, sizes.device)
    ids = torch.arange(batch, device=sizes.device)

    def step() -> None:
        first.grad = second.grad = None
        if name == OURS:
            visits = torch.ones(batch, dtype=torch.int64, device=sizes.device)
            loss = objective(first, second, state | {"visits": visits}, Progress(step=0, steps_per_epoch=1)).loss
        else:
            settings: Any = objective.settings
            loss = isogclr_step(first, second, ids, state, settings)
        loss.backward()

    return step


def _three_products(first: Tensor, second: Tensor, sizes: Sizes) -> None:
    """S and its product with either side, each into a fresh matrix: the least that forward and backward take."""
    with torch.no_grad(), ExitStack() as end:
        if sizes.precision == "tf32":
            set_until(end, torch.backends.cuda.matmul, "fp32_precision", "tf32")
        if sizes.mode == "unimodal":
            first = second = torch.cat([first, second])
        similarities = first @ second.T
        similarities @ second
        similarities.T @ first


def _seen(fields: Mapping[str, float], batch: int, device: str) -> dict[str, Tensor]:
    """A log-domain field begins at -inf, which says never seen; 0 stands for a value of 1."""
    return {path: torch.full((batch,), 0.0 if math.isinf(value) else value, device=device)
            for path, value in fields.items()}  # fmt: skip


def _seconds(step: Callable[[], None]) -> float:
    def finished() -> None:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return timed(finished)


def peak_bytes(name: str, sizes: Sizes, batch: int) -> int:
    """The most memory that a step takes; in a process of its own, as memory freed before is taken again unseen."""
    contender(name, sizes, 16)()  # what torch sets up once in a process is not the step's
    step = contender(name, sizes, batch)
    if sizes.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = memory_in_use()
    step()
    return peak_memory() - before


_BATCHES = "512+1024+2048+4096+8192"
_SMALL = Sizes("32", dim=8, seconds=0.1)
PARTS = {
    "time": Part(time, Sizes(_BATCHES), _SMALL),
    "memory": Part(memory, Sizes(f"{_BATCHES}+32768"), _SMALL),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "torch")()
