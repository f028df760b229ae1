"""What a step makes the host wait for, and how much of the state's copies is hidden behind computation."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from thermopile.trainer.config.layers import merge
from thermopile.trainer.host_copy import bytes_on_gpu

from on_gpu.findings import Findings
from on_gpu.steps import CONFIGURATIONS, Steps, settings, trainer_of
from on_gpu.timing import seconds_of, synchronize

STEPS = 5
WARM_UP = 3
BATCHES = (256, 1024)
MIN_OVERLAPPED = 0.9
SYNCHRONISES = "called a synchronizing CUDA operation"
"""torch's warning, one for each wait that it knows of."""

Span = tuple[float, float]
"""Begin and end."""


def waits(found: Findings) -> None:
    """Count the waits of steps between two lines of the log, with transformers' encoders."""
    for name in ("float32", "bf16", "checkpointed", "in micro-batches", *([] if found.small else ["compiled"])):
        asked = settings(found.device, found.small)
        merge(asked, CONFIGURATIONS[name])
        with trainer_of(asked, found.folder) as trainer:
            step = Steps(trainer, 16)
            for _ in range(WARM_UP):
                step()
            synchronize(found.device)
            with counted_waits(found.device) as where:
                for _ in range(STEPS):
                    step()
            places = ", ".join(f"{place} × {times}" for place, times in where.most_common(5))
            about = f"{asked['model']['image']['name']} and {asked['model']['text']['name']}, {name}"
            found.row(f"Waits for the device in {STEPS} steps without a line of the log",
                      {"training": about, "waits": f"{where.total()}",
                       "where": places or "–"})  # fmt: skip
            if found.device == "cuda":
                each = where.total() / STEPS
                found.check(f"waits a step: {about}", "0", f"{each:g}", each == 0)
    if found.device != "cuda":
        found.note("Waits are counted on a GPU only.")


@contextmanager
def counted_waits(device: str) -> Iterator[Counter[str]]:
    """Count the waits for the device in the block, by the line of Python that caused them; on a CPU none."""
    where: Counter[str] = Counter()
    if device != "cuda":
        yield where
        return
    # torch warns at every wait; Python drops repeated warnings of a line unless it is told not to.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield where
        finally:
            torch.cuda.set_sync_debug_mode("default")
    where.update(f"{warning.filename}:{warning.lineno}" for warning in caught if SYNCHRONISES in str(warning.message))


def copies(found: Findings) -> None:
    """Profile steps: how long the copies between host and device take, and for how much of that the device computes."""
    _bandwidth(found)
    for batch in (16,) if found.small else BATCHES:
        try:
            seen, host = _profiled(found, batch)
            copied, computed = spans(seen)
        except torch.OutOfMemoryError:
            found.note(f"A batch of {batch:,} does not fit into the memory.")
            continue
        if not copied:
            found.note(f"b = {batch:,}: the profiler saw no copy between host and device.")
            continue
        share, (began, ended) = overlapped(copied, computed), (min(computed)[0], max(end for _, end in computed))
        idle = 1 - sum(end - begin for begin, end in united([*copied, *computed])) / (ended - began)
        found.row("A step as the profiler saw it", {
            "batch": f"{batch:,}", "the GPU idles": f"{idle:.1%}", "of the host's CPU": f"{1e3 * host:.1f} ms",
        })  # fmt: skip
        if batch == BATCHES[-1]:
            _longest(found, seen)
        found.row("Copies of state between host and device, a step", {
            "batch": f"{batch:,}", "copies": f"{len(copied) / STEPS:g}",
            "time": f"{sum(end - begin for begin, end in copied) / STEPS / 1e3:.3f} ms", "overlapped": f"{share:.0%}",
        })  # fmt: skip
        found.check(f"state's copies that computation hides, b = {batch:,}", f"≥ {MIN_OVERLAPPED:.0%}", f"{share:.0%}",
                    share >= MIN_OVERLAPPED)  # fmt: skip


def _profiled(found: Findings, batch: int) -> tuple[profile, float]:
    """Return a profile of steps, and the seconds that one takes of the training thread's CPU."""
    activity, began = ProfilerActivity.CUDA if found.device == "cuda" else ProfilerActivity.CPU, time.perf_counter()
    with trainer_of(settings(found.device, found.small), found.folder) as trainer:
        step = Steps(trainer, batch)
        step()
        synchronize(found.device)
        found.note(f"b = {batch:,}: the first step was done {time.perf_counter() - began:.1f} s after the start.")
        for _ in range(WARM_UP):
            step()
        synchronize(found.device)
        seen = profile(activities=[activity])
        with seen:
            host = time.thread_time()
            for _ in range(STEPS):
                step()
            host = time.thread_time() - host
            synchronize(found.device)
        pinned = bytes_on_gpu(trainer.training_state()) / sum(each.numel() for each in trainer.encoders.parameters())
        found.note(f"A checkpoint's copy takes {pinned:.2f} bytes of pinned memory a parameter, none on a CPU.")
    return seen, host / STEPS


def _longest(found: Findings, seen: profile) -> None:
    """A row for each of the ten kernels that took longest."""
    kernels: Counter[str] = Counter()
    for event in seen.events() or ():  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.name] += event.time_range.elapsed_us()
    for name, taken in kernels.most_common(10):
        found.row("The longest kernels, a step", {"kernel": f"`{name[:90]}`", "time": f"{taken / STEPS / 1e3:.3f} ms"})


def _bandwidth(found: Findings) -> None:
    """Say how fast pinned memory is copied to the device, the limit of what is uploaded."""
    if found.device == "cuda":
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device="cuda")
        seconds = seconds_of(lambda: there.copy_(host, non_blocking=True), 5, found.device)
        found.note(f"Pinned memory goes to the GPU at {len(host) / seconds / 1e9:.1f} GB/s.")


def spans(seen: profile) -> tuple[list[Span], list[Span]]:
    """Return begin and end, in microseconds, of the copies between host and device, and of all else that it did."""
    copied: list[Span] = []
    computed: list[Span] = []
    for event in seen.events() or ():  # type: ignore[no-untyped-call]
        # An annotation spans the kernels that it names and what lies between them.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            span = (event.time_range.start, event.time_range.end)
            between = "HtoD" in event.name or "DtoH" in event.name
            (copied if between else computed).append(span)
    return copied, computed


def overlapped(copied: Sequence[Span], computed: Sequence[Span]) -> float:
    """Return the share of the time of `copied` that lies within spans of `computed`, 0 … 1."""
    busy = united(computed)
    hidden = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in copied for since, until in busy)
    total = sum(end - begin for begin, end in copied)
    return hidden / total if total else 1.0


def united(spans: Sequence[Span]) -> list[Span]:
    """Return the times that any of the spans covers, in order."""
    busy: list[Span] = []
    for begin, end in sorted(spans):
        if busy and begin <= busy[-1][1]:
            busy[-1] = (busy[-1][0], max(end, busy[-1][1]))
        else:
            busy.append((begin, end))
    return busy
