"""Where a step's time goes, measured without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Seconds = float | Callable[[], float]
"""Seconds, or what gives them once the device is done, for which it waits."""
Mark = float | torch.cuda.Event

WAITS = ("data_wait", "store_wait")
"""Parts in which the process waits; on a GPU, which may still be busy then, they bound the step's delay from above."""
COMPUTATION = ("forward_backward", "optimizer", "communication")
"""Parts that the device computes; communication, which lies within forward and backward, is taken out of these."""


class StepClock:
    """Adds up the parts of one step after another. Times on a GPU are those of its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._step_ended = time.perf_counter()
        self._last_bucket: Mark | None = None
        self._restart()

    @contextmanager
    def waiting(self, part: str) -> Iterator[None]:
        """Count the block as one of WAITS."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waits[part] += time.perf_counter() - began

    @contextmanager
    def computing(self, part: str) -> Iterator[None]:
        """Count the block as one of COMPUTATION."""
        began = self.mark()
        yield
        self.computed(part, began)

    def computed(self, part: str, began: Mark) -> None:
        """Count the time from `began` to now as one of COMPUTATION."""
        self._spans[part].append((began, self.mark()))

    def bucket_ready(self) -> None:
        """Note that gradients are ready to be summed over the ranks; what follows the last of them is communication."""
        self._last_bucket = self.mark()

    def end_of_backward(self) -> None:
        """Note that all gradients are there, those of the other ranks as well."""
        if self._last_bucket is not None:
            self.computed("communication", self._last_bucket)

    def mark(self) -> Mark:
        """This moment of the device."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def end_step(self) -> dict[str, Seconds]:
        """The seconds of the step that ends here, each part's and, since the end of the one before, the whole's."""
        ended, spans = time.perf_counter(), self._spans
        times: dict[str, Seconds] = {"step_seconds": ended - self._step_ended}
        times |= {f"{part}_seconds": seconds for part, seconds in self._waits.items()}
        for part in COMPUTATION:
            within = "communication" if part == "forward_backward" else None
            later = _Sum(spans[part], spans[within] if within else [])
            times[f"{part}_seconds"] = later if self._on_gpu else later()
        self._step_ended = ended
        self._restart()
        return times

    def _restart(self) -> None:
        self._waits = dict.fromkeys(WAITS, 0.0)
        self._last_bucket = None
        self._spans: dict[str, list[tuple[Mark, Mark]]] = {part: [] for part in COMPUTATION}


class _Sum:
    """The time in some spans without that in others."""

    def __init__(self, spans: list[tuple[Mark, Mark]], without: list[tuple[Mark, Mark]]) -> None:
        self._spans, self._without = spans, without

    def __call__(self) -> float:
        return sum(map(_seconds, self._spans)) - sum(map(_seconds, self._without))


def _seconds(span: tuple[Mark, Mark]) -> float:
    began, ended = span
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        ended.synchronize()  # no wait where the log has read a value back, but steps that were skipped have none
        return float(began.elapsed_time(ended)) / 1000
    assert isinstance(began, float)
    assert isinstance(ended, float)
    return ended - began
