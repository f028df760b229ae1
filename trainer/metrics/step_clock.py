"""Time the parts of a step without synchronising with the device."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import starmap

import torch

Seconds = float | Callable[[], float]
"""Seconds, or a function that returns them and waits for the device if necessary."""
Mark = float | torch.cuda.Event

WAITS = ("data_wait", "fetch_wait", "store_wait")
"""Parts in which the process waits; a dataset on disk has no `fetch_wait`. A GPU may still be busy meanwhile, so they
are upper bounds on the step's delay."""
COMPUTATION = ("forward_backward", "optimizer", "communication")
"""Parts computed by the device. Communication happens within forward and backward, and is subtracted from these."""


class StepClock:
    """Accumulates the parts of one step after another. GPU times are those of the current stream."""

    def __init__(self, device: torch.device, *, fetches: bool = False) -> None:
        """fetches: whether samples come from an object store."""
        self._parts = [part for part in WAITS if fetches or part != "fetch_wait"]
        self._on_gpu = device.type == "cuda"
        self._step_ended = time.perf_counter()
        self._last_bucket: Mark | None = None
        self._restart()

    @contextmanager
    def waiting(self, part: str) -> Iterator[None]:
        """Time the block as one of WAITS."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waits[part] += time.perf_counter() - began

    def reassign(self, part: str, to: str, seconds: float) -> None:
        """Move these seconds from one wait to the wait that caused them."""
        moved = min(seconds, self._waits[part])
        self._waits[part] -= moved
        self._waits[to] += moved

    @contextmanager
    def computing(self, part: str) -> Iterator[None]:
        """Time the block as one of COMPUTATION."""
        began = self.mark()
        yield
        self.computed(part, began)

    def computed(self, part: str, began: Mark) -> None:
        """Add the time since `began` to one of COMPUTATION."""
        self._spans[part].append((began, self.mark()))

    def bucket_ready(self) -> None:
        """Record that gradients are ready for reduction; the time after the last call counts as communication."""
        self._last_bucket = self.mark()

    def end_of_backward(self) -> None:
        """Record that all gradients, including those of other ranks, have arrived."""
        if self._last_bucket is not None:
            self.computed("communication", self._last_bucket)

    def mark(self) -> Mark:
        """Return the current point in time on the device."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def end_step(self) -> dict[str, Seconds]:
        """Return the seconds per part of the step that ends here, and in total since the previous step's end."""
        ended, spans = time.perf_counter(), self._spans
        times: dict[str, Seconds] = {"step_seconds": ended - self._step_ended}
        times |= {f"{part}_seconds": seconds for part, seconds in self._waits.items()}
        for part in COMPUTATION:
            # Communication happens within the backward pass.
            later = partial(_seconds, spans[part], spans["communication"] if part == "forward_backward" else [])
            times[f"{part}_seconds"] = later if self._on_gpu else later()
        self._step_ended = ended
        self._restart()
        return times

    def _restart(self) -> None:
        self._waits = dict.fromkeys(self._parts, 0.0)
        self._last_bucket = None
        self._spans: dict[str, list[tuple[Mark, Mark]]] = {part: [] for part in COMPUTATION}


def _seconds(spans: list[tuple[Mark, Mark]], without: list[tuple[Mark, Mark]]) -> float:
    return sum(starmap(_between, spans)) - sum(starmap(_between, without))


def _between(began: Mark, ended: Mark) -> float:
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        ended.synchronize()  # no wait if the log has read a value back, but skipped steps have no values
        return float(began.elapsed_time(ended)) / 1000
    assert isinstance(began, float)
    assert isinstance(ended, float)
    return ended - began
