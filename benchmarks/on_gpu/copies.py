"""What a step makes the host wait for, and how much of the state's copies is hidden behind computation."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from thermopile.trainer.checkpoints.host_copy import bytes_on_gpu

from ..harness import timed
from .findings import Findings
from .steps import Steps, settings, trainer_of
from .timing import seconds_of, synchronize

STEPS = 5
WARM_UP = 3
BATCHES = (256, 1024)
MIN_OVERLAPPED = 0.9
SYNCHRONISES = "called a synchronizing CUDA operation"
"""torch's warning, one for each wait that it knows of."""

Span = tuple[float, float]
"""Begin and end."""


def waits(found: Findings, *names: str) -> None:
    """Count the waits of steps between two lines of the log, with transformers' encoders in these configurations."""
    for name in names:
        asked = settings(found.device, found.small, name)
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
    """Profile steps: for how much of the copies' time the device computes, its longest kernels, and its idle time."""
    _bandwidth(found)
    for batch in (16,) if found.small else BATCHES:
        try:
            work = _profiled(found, batch)
        except torch.OutOfMemoryError:
            found.note(f"A batch of {batch:,} does not fit into the memory.")
            continue
        _kernels(found, batch, work)
        copied = [span for name, span in work if "HtoD" in name or "DtoH" in name]
        if not copied:
            found.note(f"b = {batch:,}: the profiler saw no copy between host and device.")
            continue
        share = overlapped(copied, [span for name, span in work if "HtoD" not in name and "DtoH" not in name])
        found.row("Copies of state between host and device, a step", {
            "batch": f"{batch:,}", "copies": f"{len(copied) / STEPS:g}",
            "time": f"{sum(end - begin for begin, end in copied) / STEPS / 1e3:.3f} ms", "overlapped": f"{share:.0%}",
        })  # fmt: skip
        found.check(f"state's copies that computation hides, b = {batch:,}", f"≥ {MIN_OVERLAPPED:.0%}", f"{share:.0%}",
                    share >= MIN_OVERLAPPED)  # fmt: skip


def _profiled(found: Findings, batch: int) -> list[tuple[str, Span]]:
    """Return what the device did in some steps, or without a GPU the CPU's operations; spans are in microseconds."""
    gpu = found.device == "cuda"
    with trainer_of(settings(found.device, found.small), found.folder) as trainer:
        step = Steps(trainer, batch)
        queueing = []
        for _ in range(WARM_UP + STEPS):
            synchronize(found.device)  # so that the host waits for no earlier step
            queueing.append(timed(step))
        synchronize(found.device)
        found.row("What the host takes to queue a step",
                  {"batch": f"{batch:,}", "a step": f"{1e3 * median(queueing[WARM_UP:]):.1f} ms"})  # fmt: skip
        with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
            for _ in range(STEPS):
                step()
            synchronize(found.device)
        if gpu:
            pinned = bytes_on_gpu(trainer.run.training_state())
            parameters = sum(each.numel() for each in trainer.run.encoders.parameters())
            found.note(f"A checkpoint's copy takes {pinned / parameters:.2f} bytes of pinned memory a parameter.")
    # An annotation spans the kernels that it names and what lies between them.
    device = DeviceType.CUDA if gpu else DeviceType.CPU
    events = (each for each in seen.events() or () if each.device_type == device and not each.is_user_annotation)
    return [(event.name, (event.time_range.start, event.time_range.end)) for event in events]


def _kernels(found: Findings, batch: int, work: Sequence[tuple[str, Span]]) -> None:
    """Tell the share of time in which the device did nothing, and what took it longest."""
    spent: dict[str, list[float]] = {}
    for name, (begin, end) in work:
        spent.setdefault(name, []).append((end - begin) / 1e3)
    if busy := merged(span for _, span in work):
        idle = 1 - sum(end - begin for begin, end in busy) / (busy[-1][1] - busy[0][0])
        found.note(f"b = {batch:,}: the device was idle for {idle:.1%} of {STEPS} steps under the profiler.")
    for name, each in sorted(spent.items(), key=lambda pair: -sum(pair[1]))[:10]:
        found.row(f"What took longest, b = {batch:,}", {
            "kernel": f"`{name[:100]}`", "calls a step": f"{len(each) / STEPS:g}",
            "a step": f"{sum(each) / STEPS:.3f} ms",
        })  # fmt: skip


def _bandwidth(found: Findings) -> None:
    host = torch.empty(2**20 if found.small else 2**28, dtype=torch.uint8, pin_memory=found.device == "cuda")
    device = torch.empty_like(host, device=found.device)
    seconds = seconds_of(lambda: device.copy_(host, non_blocking=True), 10, found.device)
    found.note(f"From pinned memory to the device: {len(host) / seconds / 1e9:.1f} GB a second.")


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the time within any of the spans, as spans that do not meet."""
    busy: list[Span] = []
    for begin, end in sorted(spans):
        if busy and begin <= busy[-1][1]:
            busy[-1] = (busy[-1][0], max(end, busy[-1][1]))
        else:
            busy.append((begin, end))
    return busy


def overlapped(copied: Sequence[Span], computed: Sequence[Span]) -> float:
    """Return the share of the time of `copied` that lies within spans of `computed`, 0 … 1."""
    busy = merged(computed)
    hidden = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in copied for since, until in busy)
    total = sum(end - begin for begin, end in copied)
    return hidden / total if total else 1.0
