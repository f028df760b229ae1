"""Time and memory of work on a device."""

import gc
import time
from collections.abc import Callable

import torch


def synchronize(device: str) -> None:
    """Wait until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object], times: int, device: str, warm_up: int = 2) -> float:
    """Return the mean seconds of a call that is made again and again, after some to warm up."""
    for _ in range(warm_up):
        call()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / times


def begin_peak(device: str) -> int:
    """Begin to measure the peak of the device's memory, and return the bytes that are in use."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def gigabytes(device: str, without: int = 0) -> str:
    """Return the peak since begin_peak in words; on a CPU it is not measured."""
    if device != "cuda":
        return "–"
    return f"{(torch.cuda.max_memory_allocated() - without) / 1e9:.2f} GB"
