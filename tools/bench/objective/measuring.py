"""The contenders at one size, as far as the machine has room for them, and what is asked of the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..figure import Figure
from ..isolated import EndedWithoutAWordError, run_isolated
from ..machine import free_memory
from ..progress import counted
from .contenders import FASTCLIP, OURS, PRODUCTS, Case
from .memory import peak_bytes
from .timing import Timed, time_case

_SPARE_MEMORY = 10**9
"""Bytes for torch, the features and the rest of the process."""
_ERRORS = (EndedWithoutAWordError, RuntimeError, OSError)
"""What a measurement fails with; torch says RuntimeError where memory cannot be had."""


@dataclass(frozen=True)
class Times:
    """Time of the contenders at one size."""

    case: Case
    timed: Timed | None
    left_out: dict[str, str]
    """Contender -> why it was not measured."""

    def to_json(self) -> dict[str, Any]:
        timed = self.timed or Timed({}, {}, 0, 0)
        return {"batch": self.case.batch, "rounds": timed.rounds, "threads": timed.threads, "ms": timed.ms,
                "times_ours": timed.times_ours, "left_out": self.left_out}  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """Peak memory of the contenders above features and state at one size."""

    case: Case
    bytes: dict[str, int]
    left_out: dict[str, str]
    """Contender -> why it was not measured."""

    def to_json(self) -> dict[str, Any]:
        return {"batch": self.case.batch, "bytes": self.bytes, "left_out": self.left_out}


def measure_times(case: Case, seconds: float) -> Times:
    """All in one process, turn by turn for about `seconds`."""
    left_out = without_room(case, _free_memory(case))
    contenders = [contender for contender in case.contenders if contender not in left_out]
    try:
        return Times(case, run_isolated(time_case, case, contenders, seconds), left_out)
    except _ERRORS as error:
        return Times(case, None, left_out | dict.fromkeys(contenders, str(error)))


def measure_peaks(case: Case) -> Peaks:
    """Each in a process of its own."""
    left_out = without_room(case, _free_memory(case))
    contenders = [contender for contender in case.contenders if contender not in left_out]
    peaks = {}
    for number in counted(f"memory, batch {case.batch:,}", len(contenders)):
        try:
            peaks[contenders[number]] = run_isolated(peak_bytes, contenders[number], case)
        except _ERRORS as error:
            left_out[contenders[number]] = str(error)
    return Peaks(case, peaks, left_out)


def without_room(case: Case, free: int) -> dict[str, str]:
    """Contender -> what it lacks, for those that need more memory than `free` bytes."""
    return {
        contender: f"it needs about {needed / 1e9:,.1f} GB of memory, but {free / 1e9:,.1f} GB are free"
        for contender in case.contenders
        if (needed := case.needed_bytes(contender) + _SPARE_MEMORY) > free
    }


def _free_memory(case: Case) -> int:
    return torch.cuda.mem_get_info()[0] if case.device == "cuda" else free_memory()


def asked_figures(times: Sequence[Times], peaks: Sequence[Peaks]) -> list[Figure]:
    """Those of the figures that something is asked of: for isogclr on pairs at d = 512, times on a CPU."""
    figures = []
    for timed_case in times:
        if timed_case.timed and timed_case.case == Case("isogclr", "bimodal", 2048, 512, "cpu"):
            figures += _asked_of_times(timed_case.timed.times_ours)
    for peak in peaks:
        case = peak.case
        if (case.name, case.mode, case.batch, case.dim) == ("isogclr", "bimodal", 32_768, 512) and OURS in peak.bytes:
            figures.append(
                Figure("peak_gib", "peak memory of ours above the features, batch 32,768", "GiB",
                       peak.bytes[OURS] / 2**30, at_most=1)
            )  # fmt: skip
    return figures


def _asked_of_times(times_ours: dict[str, float]) -> list[Figure]:
    figures = [
        Figure("over_products", "ours over three bare products, batch 2,048", "×", 1 / times_ours[PRODUCTS],
               at_most=1.35)
    ]  # fmt: skip
    if FASTCLIP in times_ours:
        figures.append(
            Figure("fastclip_over_ours", "FastCLIP's path over ours, batch 2,048", "×", times_ours[FASTCLIP],
                   at_least=4)
        )  # fmt: skip
    return figures
