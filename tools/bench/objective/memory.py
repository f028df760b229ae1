"""The most memory that a step of a contender takes above its features and state."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..machine import memory_in_use, peak_memory, reset_peak_memory
from .contenders import Case, create_contender

_WARM_UP_BATCH = 16


def peak_bytes(contender: str, case: Case) -> int:
    """Bytes; to be called in a process of its own, for memory freed before would be taken again unseen."""
    # What torch sets up once in a process is not the step's.
    create_contender(contender, replace(case, batch=_WARM_UP_BATCH))()
    step = create_contender(contender, case)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    reset_peak_memory()
    before = memory_in_use()
    step()
    return peak_memory() - before
