"""What a step of the objective costs: for each size of the memory that it may use and of its elementwise operations,
in TF32, and compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from thermopile.trainer.objectives import pairs
from thermopile.trainer.precision import compiler_fault

from ..harness import timed
from ..objective import OURS, PRODUCTS, Sizes, contender
from .findings import Findings
from .timing import begin_peak, gigabytes, seconds_of

DIM = 512
BATCHES = (1024, 4096, 8192, 16_384, 32_768)
BUDGETS = (2**28, 2**30, 2**32)
PIECES = tuple(2**power for power in range(20, 25))
AT_MOST = 3.0
"""A compiled step in TF32 at the largest batch, in three bare products in TF32."""


@dataclass(frozen=True)
class Timed:
    """One choice of budget and piece."""

    ms: float
    budget: int
    piece: int
    memory: str

    @property
    def words(self) -> str:
        """For a cell of a table."""
        return f"{self.ms:.2f} ms, {self.memory}"


def measure(found: Findings) -> None:
    """isogclr on pairs: time and peak memory above features and state, beside three bare products; and compiled."""
    batches, dim = ((32,), 8) if found.small else (BATCHES, DIM)
    best: dict[int, Timed] = {}
    for batch in batches:
        for budget in _budgets(batch):
            step = contender(OURS, Sizes("", dim=dim, device=found.device, budget=budget), batch)
            times = 5 if batch > 8192 else 20
            of_pieces = [_timed(step, times, found.device, budget, piece) for piece in PIECES]
            cells = {f"piece {_power(piece)}": "out of memory" if each is None else each.words
                     for piece, each in zip(PIECES, of_pieces, strict=True)}  # fmt: skip
            found.row(f"isogclr on pairs, d = {dim}, float32: a step",
                      {"batch": f"{batch:,}", "budget": _power(budget), **cells})  # fmt: skip
            if possible := [each for each in (*of_pieces, best.get(batch)) if each]:
                best[batch] = min(possible, key=lambda each: each.ms)
    if fault := compiler_fault(torch.device(found.device)):
        found.note(f"Nothing was compiled: {fault}.")
    for batch, fastest in best.items():
        exact = Sizes("", dim=dim, device=found.device, budget=fastest.budget)
        tf32 = replace(exact, precision="tf32")
        fast = _timed(contender(OURS, tf32, batch), 5, found.device, fastest.budget, fastest.piece)
        torch.compiler.reset()  # of one function, torch compiles no more than eight shapes
        step = contender(OURS, replace(tf32, compile=True), batch)
        can_run, why = fast and not fault, "–" if fault else "out of memory"
        first = timed(step) if can_run else 0.0
        compiled = _timed(step, 5, found.device, fastest.budget, fastest.piece) if can_run else None
        ms, in_tf32 = (1e3 * seconds_of(contender(PRODUCTS, of, batch), 5, found.device) for of in (exact, tf32))
        found.row(f"The fastest of each batch size; the default piece is {_power(pairs.PIECE[found.device])}",
                  {"batch": f"{batch:,}", "budget": _power(fastest.budget), "piece": _power(fastest.piece),
                   "step": fastest.words, "three bare products": f"{ms:.2f} ms",
                   "step in TF32": fast.words if fast else "out of memory",
                   "compiled": f"{compiled.words}, the first {first:.1f} s" if compiled else why,
                   "three bare products in TF32": f"{in_tf32:.2f} ms"})  # fmt: skip
        if compiled and batch == BATCHES[-1]:
            ratio = compiled.ms / in_tf32
            found.check(f"objective in TF32, compiled, at b = {batch:,}: of three bare products in TF32",
                        f"≤ {AT_MOST:g} ×", f"{ratio:.1f} ×", ratio <= AT_MOST)  # fmt: skip


def _power(number: int) -> str:
    return f"2^{number.bit_length() - 1}"


def _budgets(batch: int) -> tuple[int, ...]:
    """Return the budgets up to the first that holds all similarities; larger ones change nothing."""
    enough = [budget for budget in BUDGETS if 4 * batch**2 <= budget]
    return BUDGETS[: BUDGETS.index(enough[0]) + 1] if enough else BUDGETS


def _timed(step: Callable[[], None], times: int, device: str, budget: int, piece: int) -> Timed | None:
    """Return None if there is not enough memory."""
    default, pairs.PIECE[device] = pairs.PIECE[device], piece
    try:
        before = begin_peak(device)
        seconds = seconds_of(step, times, device)
        return Timed(1e3 * seconds, budget, piece, gigabytes(device, before))
    except torch.OutOfMemoryError:
        return None
    finally:
        pairs.PIECE[device] = default
